"""Filters of rows by metadata: their JSON form, and their SQL condition.

An example is ``{"lang": "en", "year": {"gte": 2020, "lt": 2025}, "tag": {"in": ["a", "b"]}}``. A
row passes if all conditions hold. A number is neither more nor less than a text.
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
    """A filter of rows; hashable, so that its result can be cached.

    Attributes:
        conditions: each has a field, an SQL operator and its values.
    """

    conditions: tuple[tuple[str, str, tuple[Scalar, ...]], ...]

    @classmethod
    def parse(cls, given: Any) -> Filter | None:
        """Return the filter of a request; None if it has no conditions.

        Raises:
            RequestError: ``given`` is not a valid filter.
        """
        if given is None:
            return None
        if not isinstance(given, dict):
            raise _invalid("filter must be an object of fields")
        conditions: list[tuple[str, str, tuple[Scalar, ...]]] = []
        for name, condition in given.items():
            if not _FIELD.fullmatch(name):
                raise _invalid(f"{name!r} is no field of metadata")
            if not isinstance(condition, dict):
                conditions.append((name, "is", (_scalar(name, condition),)))
                continue
            for operator, value in condition.items():
                if operator == "in" and isinstance(value, list):
                    if not 0 < len(value) <= _MAX_VALUES:
                        raise _invalid(f"{name}: 'in' takes 1 to {_MAX_VALUES} values")
                    conditions.append((name, "in", tuple(_scalar(name, item) for item in value)))
                elif operator in _COMPARISONS:
                    value = _scalar(name, value)
                    conditions.append((name, _COMPARISONS[operator], (value,)))
                else:
                    known = ", ".join((*_COMPARISONS, "in"))
                    raise _invalid(f"{name}: {operator!r} is none of {known}")
        if len(conditions) > _MAX_CONDITIONS:
            raise _invalid(f"a filter has at most {_MAX_CONDITIONS} conditions")
        return cls(tuple(sorted(conditions, key=repr))) if conditions else None

    def sql(self) -> tuple[str, list[Any]]:
        """Return an SQL condition on the column ``metadata``, and the values of its parameters."""
        parts: list[str] = []
        values: list[Any] = []
        for name, operator, operands in self.conditions:
            marks = ",".join("?" * len(operands))
            right = f"({marks})" if operator == "in" else "?"
            field = field_sql(name)
            parts.append(f"{field} {operator} {right}")
            values += operands
            # SQLite orders every number before every text, and '' is the first text.
            is_text = isinstance(operands[0], str)
            if operator.startswith(">") and not is_text:
                parts.append(f"{field} < ''")
            elif operator.startswith("<") and is_text:
                parts.append(f"{field} >= ''")
        return " and ".join(parts), values


def field_sql(name: str) -> str:
    """Return the SQL expression of a metadata field.

    SQLite uses an index only if a query has exactly the expression of the index.

    Raises:
        RequestError: the field's name is invalid.
    """
    if not _FIELD.fullmatch(name):
        raise _invalid(f"{name!r} is no field of metadata")
    path = ".".join(f'"{part}"' for part in name.split("."))
    return f"json_extract(metadata, '$.{path}')"


def _scalar(name: str, value: Any) -> Scalar:
    if not isinstance(value, str | int | float | bool):
        raise _invalid(f"{name}: a filter compares with a string, number or boolean")
    if isinstance(value, int) and not -_MAX_INT - 1 <= value <= _MAX_INT:
        raise _invalid(f"{name}: {value} has more than 64 bits")
    return value


def _invalid(message: str) -> RequestError:
    return RequestError(message, param="filter")
