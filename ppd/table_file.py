"""The file of a decision table: what stands in it, and what makes it sound.

Algorithm 1 of the PPD paper (arXiv 2603.13358) keeps only the sign of a score in each cell; here
the measurements themselves are kept, so that weights can be applied afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import msgspec

from ppd.errors import TableError

VERSION = 1


class Bin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bin of an axis: ``low`` belongs to it, ``high`` does not; measured at ``at``."""

    low: float
    high: float
    at: float


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The axes of a table, in the order in which cells are indexed.

    Attributes:
        context_tokens: KV of the conversation before the turn.
        new_tokens: input that the turn adds.
        output_tokens: length of the reply.
        qps: turns a second for each decode worker (``ppd.arrivals``).
    """

    context_tokens: tuple[Bin, ...]
    new_tokens: tuple[Bin, ...]
    output_tokens: tuple[Bin, ...]
    qps: tuple[Bin, ...]

    def each(self) -> Iterator[tuple[str, tuple[Bin, ...]]]:
        for name in self.__struct_fields__:
            yield name, getattr(self, name)


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured quantity.

    Attributes:
        p99: the highest of the values while there are fewer than a hundred.
        n: how many values; 0 where the cell was not measured.
        spread: between the lowest and the highest median of a seed.
    """

    median: float
    p99: float
    n: int
    spread: float


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One route in one cell.

    Attributes:
        quiet_ttft_ms: median of the same workload when nothing else was served.
        running: mean number of requests that decoded on a decode worker meanwhile.
        qps: turns a second for each decode worker that really arrived.
    """

    ttft_ms: Statistic
    tpot_ms: Statistic
    quiet_ttft_ms: float
    running: float
    qps: float


class CellRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Attributes:
        bins: its index on each axis, in the order of ``Axes``.
        seeds: it was measured with; none: it was not, and holds what the cells around it say.
    """

    bins: tuple[int, int, int, int]
    remote: Measured
    local: Measured
    seeds: tuple[int, ...]

    @property
    def measured(self) -> bool:
        return bool(self.seeds)


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a table comes from; ``sweep`` is the sweep's configuration as it was given."""

    hardware: str
    engine: str
    plugin: str
    commit: str
    at: str
    sweep: dict[str, Any]

    @property
    def note(self) -> str:
        """What whoever uses the table should know of how it was measured; "": nothing."""
        return str(self.sweep.get("note", ""))


class TableRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table as it stands in a file.

    Attributes:
        model: as the workers name it; of a path only the last part counts.
        shape: of the cluster, ``1P1D`` for one prefill and one decode worker.
        prefill_ms_per_token: what one more token costs a remote turn that the prefill worker
            must compute and send.
        append_ms_per_token: the same of a local turn, on the decode worker.
    """

    version: int
    model: str
    shape: str
    provenance: Provenance
    prefill_ms_per_token: float
    append_ms_per_token: float
    axes: Axes
    cells: tuple[CellRecord, ...]


def decode(data: bytes) -> TableRecord:
    """The record that a file holds; whether it is sound ``problems`` says.

    Raises:
        TableError: ``data`` is no table, or of a format this version does not read.
    """
    try:
        version = msgspec.json.decode(data, type=_OnlyVersion).version
        if version != VERSION:
            raise TableError(f"its format is version {version}, this reads version {VERSION}")
        return msgspec.json.decode(data, type=TableRecord)
    except msgspec.DecodeError as error:
        raise TableError(f"it is no decision table: {error}") from error


class _OnlyVersion(msgspec.Struct):
    version: int


def problems(record: TableRecord) -> Iterator[str]:
    """Everything that is wrong with a table's content."""
    if not record.model:
        yield "model is empty"
    for name in ("prefill_ms_per_token", "append_ms_per_token"):
        value = getattr(record, name)
        if not 0 < value < math.inf:
            yield f"{name} must be above 0, got {value}"
    sound = True
    for name, bins in record.axes.each():
        for problem in _axis_problems(name, bins):
            sound = False
            yield problem
    seen: set[tuple[int, ...]] = set()
    sizes = [len(bins) for _, bins in record.axes.each()]
    for cell in record.cells:
        if any(not 0 <= i < size for i, size in zip(cell.bins, sizes, strict=True)):
            yield f"cell {list(cell.bins)} lies outside the axes"
        if cell.bins in seen:
            yield f"cell {list(cell.bins)} stands twice"
        seen.add(cell.bins)
        for route in ("remote", "local"):
            where = f"cell {list(cell.bins)} {route}"
            yield from _cell_problems(where, getattr(cell, route), cell.measured)
    if sound:
        for bins_of in product(*map(range, sizes)):
            if bins_of not in seen:
                yield f"cell {list(bins_of)} is missing"


def _axis_problems(name: str, bins: Sequence[Bin]) -> Iterator[str]:
    if not bins:
        yield f"axis {name} has no bins"
    for i, one in enumerate(bins):
        # Also refuses NaN, of which every comparison is false.
        if not 0 <= one.low <= one.at < one.high < math.inf:
            yield (
                f"axis {name}, bin {i}: 0 <= low <= at < high must hold, got "
                f"{one.low}, {one.at}, {one.high}"
            )
    for i, (one, two) in enumerate(pairwise(bins)):
        if two.low < one.high:
            yield f"axis {name}: bins {i} and {i + 1} overlap ({one.high} and {two.low})"
        elif two.low > one.high:
            yield f"axis {name}: a hole between bins {i} and {i + 1} ({one.high} to {two.low})"


def _cell_problems(where: str, measured: Measured, has_seeds: bool) -> Iterator[str]:
    for name in ("ttft_ms", "tpot_ms"):
        one: Statistic = getattr(measured, name)
        if not 0 < one.median < math.inf:
            yield f"{where}: {name}.median must be above 0, got {one.median}"
        if not one.median <= one.p99 < math.inf:
            yield f"{where}: {name}.p99 must be at least the median, got {one.p99}"
        if not 0 <= one.spread < math.inf:
            yield f"{where}: {name}.spread must be 0 or more, got {one.spread}"
        if (one.n > 0) is not has_seeds:
            wanted = "at least 1" if has_seeds else "0, there are no seeds"
            yield f"{where}: {name}.n must be {wanted}, got {one.n}"
    if not 0 < measured.quiet_ttft_ms < math.inf:
        yield f"{where}: quiet_ttft_ms must be above 0, got {measured.quiet_ttft_ms}"
    for name in ("running", "qps"):
        value = getattr(measured, name)
        if not 0 <= value < math.inf:
            yield f"{where}: {name} must be 0 or more, got {value}"
