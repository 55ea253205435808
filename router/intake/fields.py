"""Checks a client's JSON against a typed structure, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

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
# As msgspec names types in its messages.
_KINDS = {
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `[^`]+`")
_OUT_OF_RANGE = re.compile(r"Expected `[^`]+` (of length )?([<>]=?) (\S+)")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_RANGES = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}

T = TypeVar("T")


def kind_of(value: object) -> str:
    """The JSON type of a value, in words."""
    return _NAMES[type(value)]


def checked(body: Mapping[str, Any], kind: type[T]) -> T:
    """The known fields of a body; unknown ones are not looked at.

    Args:
        body: JSON of a client.
        kind: a msgspec structure of the known fields.

    Raises:
        RequestError: naming the field at fault, what is allowed and what was given.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _plain(str(error), body) from None


def _plain(message: str, body: Mapping[str, Any]) -> RequestError:
    """A message of msgspec in our words."""
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    if (found := _MISSING.match(what)) is not None:
        name = f"{path}.{found[1]}".removeprefix(".")
        return RequestError(f"{name} is missing", param=name)
    value = _at(body, path)
    if (found := _WRONG_TYPE.match(what)) is not None:
        kinds = [_KINDS[one] for one in found[1].split(" | ") if one in _KINDS]
        message = f"{path} must be {' or '.join(kinds)}, got {kind_of(value)}"
    elif (found := _OUT_OF_RANGE.match(what)) is not None:
        if found[1]:
            message = f"{path} is empty"
        else:
            message = f"{path} must be {_RANGES[found[2]]} {found[3]}, got {value}"
    return RequestError(message, param=path)


def _at(body: Any, path: str) -> Any:
    """The value at a path of msgspec's, as ``messages[0].role``."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        body = body[int(index)] if index else body[name]
    return body


def typed(params: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    """One field of a body, or ``default`` where it is missing or null.

    Raises:
        RequestError: it is of another type.
    """
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        allowed = " or ".join(_NAMES[k] for k in kinds)
        raise RequestError(f"{name} must be {allowed}, got {kind_of(value)}", param=name)
    return value


def sampling_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sampling parameters of a ``/generate`` body: one object, or one for each prompt.

    Raises:
        RequestError: they are something else.
    """
    value = typed(body, "sampling_params", (dict, list), {})
    several: list[Any] = value if isinstance(value, list) else [value]
    for i, one in enumerate(several):
        if not isinstance(one, dict):
            where = f"sampling_params[{i}]"
            raise RequestError(f"{where} must be an object, got {kind_of(one)}", param=where)
    return several
