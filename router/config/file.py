"""The router's configuration file: TOML with the fields of ``RouterConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from ppd.errors import ConfigError

from .options import RouterConfig

_WORKERS = ("prefill", "decode", "replica", "accept_workers", "workers_file", "kubernetes")


def read_config(path: str, flags: Mapping[str, Any]) -> RouterConfig:
    """
    Args:
        flags: fields that win over the file's.

    Raises:
        ConfigError: the file cannot be read; or holds something else, or what it says makes no
            sense: all of it is told.
    """
    try:
        given = msgspec.toml.decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:  # of TOML's syntax
        raise ConfigError(f"{path}: {error}") from error
    wrong: list[str] = []
    fields = _read(RouterConfig, given, "", wrong)
    config = msgspec.structs.replace(msgspec.convert(fields, RouterConfig), **flags)
    if not wrong:
        return config
    found = config.problems()
    if any(name in given and name not in fields for name in _WORKERS):
        found = [one for one in found if not one.startswith("at least one")]  # it may be there
    raise ConfigError(f"{path}: {'; '.join([*sorted(wrong), *found])}")


def _read(
    struct: type[msgspec.Struct], given: Mapping[str, Any], where: str, wrong: list[str]
) -> dict[str, Any]:
    """The fields that are right; of the others ``wrong`` is told."""
    known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    wrong += [f"there is no option {where}{name}" for name in given.keys() - known.keys()]
    wrong += [
        f"{where}{name} is needed"
        for name, field in known.items()
        if field.required and name not in given
    ]
    right: dict[str, Any] = {}
    for name in known.keys() & given.keys():
        value, its = given[name], known[name].type
        before = len(wrong)
        inner = _struct_of(its)
        if inner is not None and isinstance(value, dict):
            value = _read(inner, value, f"{where}{name}.", wrong)
        elif get_origin(its) is dict and isinstance(value, dict):
            of_each = _struct_of(get_args(its)[1])
            if of_each is not None:
                value = {
                    key: _read(of_each, one, f"{where}{name}.{key}.", wrong)
                    if isinstance(one, dict)
                    else one
                    for key, one in value.items()
                }
        try:
            msgspec.convert(value, its)
        except msgspec.ValidationError as error:
            if len(wrong) == before:  # else it has been told what is missing
                wrong.append(f"{where}{name}: {error}")
        else:
            right[name] = value
    return right


def _struct_of(its: Any) -> type[msgspec.Struct] | None:
    """The one that a field holds, or may hold."""
    kinds = get_args(its) if get_origin(its) in (UnionType, Union) else (its,)
    structs = [one for one in kinds if one is not NoneType]
    (only,) = structs if len(structs) == 1 else (None,)
    return only if isinstance(only, type) and issubclass(only, msgspec.Struct) else None
