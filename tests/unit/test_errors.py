"""The exceptions of the core and of the plugin: one tree, drawn completely."""

from __future__ import annotations

import ast
from pathlib import Path

import ppd
import sglang_patches
from ppd import errors

PACKAGES = (ppd, sglang_patches)


def _subclasses(base: type[errors.PpdError]) -> list[type[errors.PpdError]]:
    direct = [one for one in base.__subclasses__() if one.__module__ == errors.__name__]
    return [*direct, *(below for one in direct for below in _subclasses(one))]


def test_the_drawing_holds_every_class_of_the_tree() -> None:
    drawing = errors.__doc__ or ""
    drawn = [line.split("── ")[1].split()[0] for line in drawing.splitlines() if "── " in line]
    assert sorted(drawn) == sorted(one.__name__ for one in _subclasses(errors.PpdError))


def test_no_other_module_defines_an_exception() -> None:
    found = []
    for package in PACKAGES:
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                    if any(base.endswith(("Error", "Exception")) for base in bases):
                        found.append((path.name, node.name))
    tree: list[type[errors.PpdError]] = [errors.PpdError, *_subclasses(errors.PpdError)]
    assert sorted(found) == sorted(("errors.py", one.__name__) for one in tree)
