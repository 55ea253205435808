"""``ppd-worker --check-engine``: what the installed SGLang has moved of what the plugin uses.

It compares the targets of the hooks, and every name that this package imports from SGLang. For a
version that is not supported yet, it reads the names as those of the newest supported one. It
finds no change of behaviour; the engine tests do that.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from sglang_patches.engines import ENGINES, SUPPORTED, installed
from sglang_patches.targets import Hook


def check_engine(hooks: tuple[Hook, ...]) -> tuple[list[str], int]:
    """Compare the plugin with the installed SGLang.

    Returns:
        The lines of the report, and the number of names that have moved.
    """
    found = installed()
    read_as = found.read_as if found.read_as in ENGINES else SUPPORTED[-1]
    version = ENGINES[read_as]()
    kind = "supported" if found.version == read_as else f"not supported, read as {read_as}"
    name = str(found) if found.is_tree else f"SGLang {found.version}"
    lines = [f"{name}: {kind}"]
    moved = 0
    for hook in hooks:
        problem = hook.problem(version)
        moved += problem is not None
        lines.append(
            f"ok     {hook.path_in(version)}"
            if problem is None
            else f"MOVED  {problem}; {hook.reason}; read against {hook.upstream}"
        )
    for source, line, name in sorted(imported_names()):
        if (error := _import_error(name)) is not None and not _is_of_another(source, read_as):
            moved += 1
            lines.append(f"MOVED  {name} ({error}); imported in {source}:{line}")
    lines.append(f"{moved} moved")
    return lines, moved


def imported_names() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and dotted name of everything that this package imports from SGLang."""
    package = Path(__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in node.names:
                    source = str(path.relative_to(package.parent))
                    yield source, node.lineno, f"{node.module}:{alias.name}"


def _import_error(name: str) -> str | None:
    module, _, attribute = name.partition(":")
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        try:
            pkgutil.resolve_name(f"{module}.{attribute}")  # a module of the package
        except (ImportError, AttributeError):
            return str(error)
    return None


def _is_of_another(source: str, version: str) -> bool:
    """Whether a name in ``source`` may belong to another version than ``version``.

    ``engines.py`` has the names of all versions; only one class of it is used. The speculation of
    the CPU engine needs a version that permits it.
    """
    if source.endswith("cpu/speculation.py"):
        return not ENGINES[version].speculative_algorithms
    return source.endswith("/engines.py")
