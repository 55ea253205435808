"""How the packages of an extra are installed."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that adds an extra.

    This package is on no index, so the command needs a checkout.
    """
    return f"pip install '.[{extra}]' in a checkout of sglang-ppd"
