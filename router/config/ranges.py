"""Ranges of numeric options, as types, and the check of a configuration against them.

A ``msgspec.Struct`` does not check the values it is constructed with. So a configuration is
constructed first and checked later, as a whole: every option out of range is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

_MAX_PORT = 65535

Positive = Annotated[float, msgspec.Meta(gt=0, description="above 0")]
PositiveInt = Annotated[int, msgspec.Meta(gt=0, description="above 0")]
NonNegative = Annotated[float, msgspec.Meta(ge=0, description="0 or more")]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, description="0 or more")]
CountFromOne = Annotated[int, msgspec.Meta(ge=1, description="1 or more")]
Share = Annotated[float, msgspec.Meta(gt=0, le=1, description="above 0 and at most 1")]
Port = Annotated[int, msgspec.Meta(ge=0, le=_MAX_PORT, description=f"0..{_MAX_PORT}")]
RemotePort = Annotated[int, msgspec.Meta(ge=1, le=_MAX_PORT, description=f"1..{_MAX_PORT}")]
PortName = Annotated[str, msgspec.Meta(min_length=1, description="a port's name")]


def range_problems(config: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Yield a message for each option that lies outside its range.

    Nested structs are not checked: each of them has a check of its own.

    Args:
        config: to be checked.
        prefix: precedes the options' names in messages, as ``admission.``.
    """
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if problem := range_problem(f"{prefix}{field.encode_name}", value, field.type):
            yield problem


def range_problem(name: str, value: object, kind: Any) -> str | None:
    """Return why ``value`` lies outside the range of its type, or None.

    Args:
        name: of the option, for the message.
        value: of the option.
        kind: the option's annotation; None is returned for an annotation without a range.
    """
    allowed = _allowed(kind)
    if not allowed:
        return None
    try:
        msgspec.convert(value, kind)  # also refuses NaN
    except msgspec.ValidationError:
        return f"{name} must be {allowed}, got {value!r}"
    return None


def without_ranges(kind: Any) -> Any:
    """Return an annotation without its ranges, for instance ``int | None`` for ``Port | None``."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    if get_origin(kind) in (UnionType, Union):
        return Union[tuple(without_ranges(member) for member in get_args(kind))]  # noqa: UP007
    return kind


def _allowed(kind: Any) -> str:
    """Return what an annotation's ranges allow, in words; "" if it has none."""
    if get_origin(kind) is Annotated:
        found = (meta.description for meta in kind.__metadata__ if isinstance(meta, msgspec.Meta))
        return next(filter(None, found), "")
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(filter(None, map(_allowed, get_args(kind))))
    return ""
