"""Decoding a TOML file into a struct, with every problem of the file reported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from ppd.errors import ConfigError, PpdError

from .ranges import without_ranges


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        content: dict[str, Any] = msgspec.toml.decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return content


def decode_fields(
    struct: type[msgspec.Struct], content: Mapping[str, Any], problems: list[str], prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of ``struct`` that ``content`` has with the right type.

    Ranges are not checked here: a flag may replace a value that is out of range.

    Args:
        struct: the type of a whole file, or of a table in it.
        content: the parsed TOML.
        problems: a message is appended for every unknown, missing or wrongly typed field.
        prefix: precedes the fields' names in messages, as ``tenants.blue.``.
    """
    known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    problems += [f"there is no option {prefix}{name}" for name in content.keys() - known.keys()]
    problems += [
        f"{prefix}{name} is needed"
        for name, field in known.items()
        if field.required and name not in content
    ]
    fields: dict[str, Any] = {}
    for name in known.keys() & content.keys():
        before = len(problems)
        try:
            value = _decode(known[name].type, content[name], problems, f"{prefix}{name}")
        except (msgspec.ValidationError, _IncompleteError) as error:
            if len(problems) == before:  # otherwise the problem has been reported by name
                problems.append(f"{prefix}{name}: {error}")
        else:
            fields[known[name].name] = value
    return fields


class _IncompleteError(PpdError):
    """A required field of a nested struct is missing or has the wrong type."""


def _decode(kind: Any, value: Any, problems: list[str], name: str) -> Any:
    """Return ``value`` as the annotation ``kind`` requires it, ranges excepted."""
    struct = _struct_of(kind)
    if struct is not None and isinstance(value, dict):
        return _decode_struct(struct, value, problems, name)
    if get_origin(kind) is dict and isinstance(value, dict):
        item_struct = _struct_of(get_args(kind)[1])
        if item_struct is not None and all(isinstance(item, dict) for item in value.values()):
            return {
                key: _decode_struct(item_struct, item, problems, f"{name}.{key}")
                for key, item in value.items()
            }
    return msgspec.convert(value, without_ranges(kind))


def _decode_struct(
    struct: type[msgspec.Struct], content: Mapping[str, Any], problems: list[str], name: str
) -> msgspec.Struct:
    fields = decode_fields(struct, content, problems, f"{name}.")
    required = {field.name for field in msgspec.structs.fields(struct) if field.required}
    if required - fields.keys():
        raise _IncompleteError
    return struct(**fields)


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct of an annotation ``Struct`` or ``Struct | None``; None for any other."""
    members = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    others = [member for member in members if member is not NoneType]
    (only,) = others if len(others) == 1 else (None,)
    return only if isinstance(only, type) and issubclass(only, msgspec.Struct) else None
