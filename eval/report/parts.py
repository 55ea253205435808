"""The parts of a report and of documents: sections, tables, blocks, and how numbers are written."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ..simulation.cost_model import VLLM_H100
from .results import Rows
from .sources import NotMeasured, Source

_LINE = 120
PAPER_MACHINE = (
    "simulated with `VLLM_H100`, the paper's machine, links of "
    f"{VLLM_H100.link_bytes_per_s / 1e9:g} GB/s"
)
"""Of rows that name no profile."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a section.

    Attributes:
        rows: each with a cell for each of the heads.
        caption: what it is, and how to read it; parts with ``; `` between become sentences.
    """

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""

    def __post_init__(self) -> None:
        """Assert that the rows are as wide as the head."""
        for row in self.rows:
            assert len(row) == len(self.head), f"{len(row)} cells for the heads {self.head}: {row}"

    def markdown(self) -> str:
        """Return the table in Markdown, below its caption."""
        lines = [self.head, tuple("---" for _ in self.head), *self.rows]
        parts = self.caption.split("; ") if self.caption else []
        caption = ". ".join(f"{part[:1].upper()}{part[1:]}" for part in parts)
        caption = caption and f"{caption}:"
        above = f"{filled(caption, _LINE)}\n\n" if caption else ""
        return above + "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between the markers of a document: text, and the rows that it is made of."""

    text: str
    made_of: tuple[Rows, ...]

    def markdown(self) -> str:
        """Return the text, with the origin of its rows under it; some text needs no rows."""
        if not self.made_of:
            return self.text
        by_file: dict[str, Rows] = {}
        for rows in self.made_of:
            before = by_file.get(rows.file)
            by_file[rows.file] = rows if before is None else before.and_also(rows)
        origins = (filled(f"Rows: {of.origin()}.") for of in by_file.values())
        lines = "<br>\n".join(origins)
        return f"{self.text}\n\n<sub>{lines}</sub>"


def filled(text: str, width: int = _LINE - 10) -> str:
    """Return text in lines of a width; the default leaves room for tags."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def block(*tables: Table, made_of: Sequence[Rows]) -> Block:
    """Return a block of tables."""
    return Block("\n\n".join(table.markdown() for table in tables), tuple(made_of))


Draw = Callable[[], str]
Content = tuple[Draw | None, tuple[Table, ...]]


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the report.

    Attributes:
        name: short, as files and links are called.
        reads: how to read it.
        source: the file, or what is to be run to get it.
        figure: draws it, once.
    """

    name: str
    title: str
    reads: str
    source: Source | NotMeasured
    figure: Draw | None = None
    tables: tuple[Table, ...] = ()


def section(
    name: str,
    title: str,
    reads: str,
    source: Source | NotMeasured,
    make: Callable[[Source], Content],
) -> Section:
    """Return a section, whose figure and tables are made if there is anything to make them of."""
    if isinstance(source, NotMeasured):
        return Section(name, title, reads, source)
    figure, tables = make(source)
    return Section(name, title, reads, source, figure and functools.cache(figure), tables)


def short(value: float | None) -> str:
    """Format a number with few digits; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a share as a percentage; None is a dash."""
    return "-" if value is None else f"{value:.0%}"


def change(ratio: float) -> str:
    """Format a ratio as what it adds or takes, in percent."""
    return f"{100 * (ratio - 1):+.0f} %"


def spread(values: Sequence[float]) -> str:
    """Format the median of some values, with the lowest and the highest; none are a dash."""
    if not values:
        return "-"
    middle, low, high = (short(f(values)) for f in (median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"
