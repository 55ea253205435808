"""The build backend: setuptools, with what a compiled wheel needs where there is a C compiler.

``PPD_COMPILE`` overrides the choice: 1 compiles, or the build fails; 0 does not.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_COMPILER = "mypy>=1.18"


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what a wheel is built with: mypyc checks the types of all that the router imports."""
    required = list(build_meta.get_requires_for_build_wheel(config_settings))
    if not wants_compiled():
        return required
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*required, _COMPILER, *project["dependencies"]]


def compiles() -> bool:
    """Return whether this wheel is to be compiled.

    Without ``PPD_COMPILE`` it is, if the compilers of C and of Python's types are there.
    """
    if os.environ.get("PPD_COMPILE") == "1":
        return True
    return wants_compiled() and find_spec("mypyc") is not None


def wants_compiled() -> bool:
    """Return whether a wheel should be compiled on this machine."""
    match os.environ.get("PPD_COMPILE", ""):
        case "0":
            return False
        case "1":
            return True
        case _:
            return _has_c_compiler()


def _has_c_compiler() -> bool:
    """Return whether there is a C compiler, and Python's headers for it."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(command.split()[0]) is not None and headers.is_file()
