"""The router's own fields, which are the same in every API, in requests and in answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("retrieval", "answer_cache")


def extensions(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The router's own fields of a body; a field that is null counts."""
    return {name: fields[name] for name in _NAMES if name in fields}
