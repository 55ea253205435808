"""Reading fields of a client's JSON, with errors that name the field and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppd.errors import RequestError

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def typed(params: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        allowed = " or ".join(_NAMES[k] for k in kinds)
        raise RequestError(f"{name} must be {allowed}, got {kind_of(value)}", param=name)
    return value


def kind_of(value: object) -> str:
    return _NAMES[type(value)]


def sampling_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sampling parameters of a ``/generate`` body: one object, or one for each prompt."""
    value = typed(body, "sampling_params", (dict, list), {})
    several: list[Any] = value if isinstance(value, list) else [value]
    for i, one in enumerate(several):
        if not isinstance(one, dict):
            where = f"sampling_params[{i}]"
            raise RequestError(f"{where} must be an object, got {kind_of(one)}", param=where)
    return several
