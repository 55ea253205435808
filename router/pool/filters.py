"""Which rows a search may find, by their metadata: the wire form, and its SQL condition.

``{"lang": "en", "year": {"gte": 2020, "lt": 2025}, "tag": {"in": ["a", "b"]}}``: all must hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ppd.errors import RequestError

_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<=", "ne": "is not"}
_MAX_CONDITIONS = 16
_MAX_VALUES = 256
_MAX_INT = 2**63 - 1

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions, each a field, an operator and its values; hashable, so that it can be kept."""

    conditions: tuple[tuple[str, str, tuple[Scalar, ...]], ...]

    @classmethod
    def parse(cls, given: Any) -> Filter | None:
        """
        Raises:
            RequestError: it is no filter.
        """
        if given is None:
            return None
        if not isinstance(given, dict):
            raise _wrong("filter must be an object of fields")
        conditions: list[tuple[str, str, tuple[Scalar, ...]]] = []
        for name, wanted in given.items():
            if not _FIELD.fullmatch(name):
                raise _wrong(f"{name!r} is no field of metadata")
            if not isinstance(wanted, dict):
                conditions.append((name, "is", (_scalar(name, wanted),)))
                continue
            for operator, value in wanted.items():
                if operator == "in" and isinstance(value, list):
                    if not 0 < len(value) <= _MAX_VALUES:
                        raise _wrong(f"{name}: 'in' takes 1 to {_MAX_VALUES} values")
                    conditions.append((name, "in", tuple(_scalar(name, one) for one in value)))
                elif operator in _COMPARISONS:
                    value = _scalar(name, value)
                    conditions.append((name, _COMPARISONS[operator], (value,)))
                else:
                    known = ", ".join((*_COMPARISONS, "in"))
                    raise _wrong(f"{name}: {operator!r} is none of {known}")
        if len(conditions) > _MAX_CONDITIONS:
            raise _wrong(f"a filter has at most {_MAX_CONDITIONS} conditions")
        return cls(tuple(sorted(conditions, key=repr))) if conditions else None

    def sql(self) -> tuple[str, list[Any]]:
        """A condition on the column ``metadata``, and the values of its marks."""
        parts: list[str] = []
        values: list[Any] = []
        for name, operator, wanted in self.conditions:
            marks = ",".join("?" * len(wanted))
            right = f"({marks})" if operator == "in" else "?"
            parts.append(f"{field_sql(name)} {operator} {right}")
            values += wanted
        return " and ".join(parts), values


def field_sql(name: str) -> str:
    """A field of the column ``metadata``; an index of it is found by these very letters.

    Raises:
        RequestError: there cannot be such a field.
    """
    if not _FIELD.fullmatch(name):
        raise _wrong(f"{name!r} is no field of metadata")
    path = ".".join(f'"{part}"' for part in name.split("."))
    return f"json_extract(metadata, '$.{path}')"


def _scalar(name: str, value: Any) -> Scalar:
    if not isinstance(value, str | int | float | bool):
        raise _wrong(f"{name}: a filter compares with a string, number or boolean")
    if isinstance(value, int) and not -_MAX_INT - 1 <= value <= _MAX_INT:
        raise _wrong(f"{name}: {value} has more than 64 bits")
    return value


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="filter")
