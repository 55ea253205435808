"""The wheel. Its token path is compiled by mypyc where there is a C compiler (build_backend.py).

The same source either way: modules that the compiler cannot take (structs of msgspec, an exception
that is an ``OSError``) and all that is not on the path of every request stay Python, and every
module is in the wheel as Python too.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

from build_backend import compiles

_CORE = ("arrivals", "attempts", "backlog", "forecast", "headroom")
_COMPILED = {
    "apis": ("front",),
    "intake": (
        *("admission", "fields", "keys", "objectives", "parser", "rates", "requests"),
        "scrub",
    ),
    "observability": ("batch", "counting", "journal", "metrics"),
    "serving": ("bodies", "context", "handler", "recorder", "legs", "model", "relay", "sending"),
    "wire": ("client", "connection", "heads", "reading", "request", "upstream"),
    "workers": ("breaker", "group", "health", "registry", "worker"),
}


def _compiled() -> list[object]:
    from mypyc.build import mypycify

    # mypyc names modules by their folders, and the wheel's are not the checkout's.
    staged = Path("build/staged")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree("router", staged / "ppd_router")
    os.environ["MYPYPATH"] = str(staged)
    sources = [f"ppd/{name}.py" for name in _CORE]
    sources += [
        str(staged / "ppd_router" / package / f"{name}.py")
        for package, names in _COMPILED.items()
        for name in names
    ]
    # Extras, as OpenTelemetry, are not installed where a wheel is built.
    found: list[object] = mypycify(["--ignore-missing-imports", *sources], opt_level="2")
    return found


# Not for its metadata, which are asked for first.
setup(ext_modules=_compiled() if "bdist_wheel" in sys.argv and compiles() else [])
