"""Types and default values of options, in words."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from .tables import code

_PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Any: "any",
}
_PLURALS: dict[Any, str] = {str: "strings", int: "integers", float: "numbers"}


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a structure.

    Attributes:
        kind: its annotation.
        default: its default value; None if it has none, and if that is the default.
        required: it must be given.
    """

    name: str
    kind: Any
    default: Any
    required: bool


def options_of(kind: type) -> Iterator[Option]:
    """Yield the fields of a msgspec structure or of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    missing: tuple[object, ...] = (msgspec.NODEFAULT, dataclasses.MISSING)
    for field in _fields(kind):
        default = field.default
        if default in missing and field.default_factory not in missing:
            default = field.default_factory()
        required = default in missing
        yield Option(field.name, hints[field.name], None if required else default, required)


def _fields(kind: Any) -> Sequence[Any]:
    if issubclass(kind, msgspec.Struct):
        return msgspec.structs.fields(kind)
    return dataclasses.fields(kind)


def structures(kind: Any) -> Iterator[tuple[str, type]]:
    """Yield the structures in an annotation, with what precedes the names of their fields."""
    if _is_structure(kind):
        yield "", kind
    elif get_origin(kind) is dict:
        yield from ((f".NAME{path}", one) for path, one in structures(get_args(kind)[1]))
    else:
        for part in get_args(kind):
            yield from structures(part)


def type_words(kind: Any) -> str:
    """An annotation in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        limits = [meta.description for meta in parts[1:] if isinstance(meta, msgspec.Meta)]
        return ", ".join([type_words(parts[0]), *filter(None, limits)])
    if origin is Literal:
        return " or ".join(map(code, parts))
    if origin in (Union, UnionType):
        return " or ".join(type_words(part) for part in parts if part is not NoneType)
    if origin is dict:
        return f"table by name: {type_words(parts[1])}"
    if origin in (tuple, frozenset, list):
        return f"list of {_PLURALS.get(parts[0]) or type_words(parts[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(member.value) for member in kind)
    return "table"


def default_words(option: Option) -> str:
    """The default value of an option, as a TOML file would have it."""
    if option.required:
        return "required"
    if option.default is None:
        return "none"
    if _is_structure(type(option.default)):
        return "its own defaults"
    return code(toml(option.default))


def toml(value: Any) -> str:
    """A plain value as TOML has it."""
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return f'"{value.value}"'
        case str():
            return f'"{value}"'
        case float() if value.is_integer():
            return f"{value:.0f}"
        case frozenset():
            return f"[{', '.join(sorted(map(toml, value)))}]"
        case tuple() | list():
            return f"[{', '.join(map(toml, value))}]"
        case Mapping() if not value:
            return "{}"
        case _:
            return str(value)


def _is_structure(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
