"""Which build of the router runs: compiled by mypyc, or pure Python."""

from __future__ import annotations

from ..intake import requests


def build() -> str:
    """Return the build, in words."""
    return "pure Python" if requests.__file__.endswith(".py") else "compiled"
