"""The parts of a report: sections with a figure, tables, and the file behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .sources import NotMeasured, Source


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a section.

    Attributes:
        caption: what it is, where there are several.
    """

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the report.

    Attributes:
        name: short, as files and links are called.
        reads: how to read it.
        source: the file, or what is to be run to get it.
    """

    name: str
    title: str
    reads: str
    source: Source | NotMeasured
    figure: str | None = None
    tables: tuple[Table, ...] = ()


Content = tuple[str | None, tuple[Table, ...]]


def section(
    name: str,
    title: str,
    reads: str,
    source: Source | NotMeasured,
    make: Callable[[Source], Content],
) -> Section:
    """A section, whose figure and tables are made if there is anything to make them of."""
    if isinstance(source, NotMeasured):
        return Section(name, title, reads, source)
    figure, tables = make(source)
    return Section(name, title, reads, source, figure, tables)


def short(value: float | None) -> str:
    """Format a number with few digits; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a share as a percentage; None is a dash."""
    return "-" if value is None else f"{value:.0%}"
