"""Huge pages for all libraries of a benchmark, as numpy asks for them by itself."""

from __future__ import annotations

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"


def ensure() -> None:
    """Start this command again with huge pages, unless it has them."""
    if os.environ.get("GLIBC_TUNABLES") != _TUNABLE:
        os.environ["GLIBC_TUNABLES"] = _TUNABLE
        package = (__package__ or "eval.pool").rpartition(".")[0]
        os.execv(sys.executable, [sys.executable, "-m", package, *sys.argv[1:]])
