"""Fields that are the router's own: the same in every API, in requests and in answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("retrieval", "answer_cache")


def extensions(of: Mapping[str, Any]) -> dict[str, Any]:
    """Those that stand in it; null is a value, too."""
    return {name: of[name] for name in _NAMES if name in of}
