"""The file format of a decision table, and its validation.

Algorithm 1 of the PPD paper (arXiv 2603.13358) keeps only the sign of a score in each cell. Here
the measurements themselves are kept, so that weights can be applied afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import msgspec

from ppd.errors import TableError
from ppd.machine import Machine

VERSION = 1


class Bin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bin of an axis.

    Attributes:
        low: lower bound, inclusive.
        high: upper bound, exclusive.
        at: the value at which the bin was measured.
    """

    low: float
    high: float
    at: float


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The axes of a table, in the order in which cells are indexed.

    Attributes:
        context_tokens: tokens of the conversation's KV before the turn.
        new_tokens: input tokens that the turn adds.
        output_tokens: tokens of the reply.
        qps: turns per second and decode worker (``ppd.arrivals``).
    """

    context_tokens: tuple[Bin, ...]
    new_tokens: tuple[Bin, ...]
    output_tokens: tuple[Bin, ...]
    qps: tuple[Bin, ...]

    def each(self) -> Iterator[tuple[str, tuple[Bin, ...]]]:
        """Iterate over the axes: name and bins."""
        for name in self.__struct_fields__:
            yield name, getattr(self, name)


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The statistic of a measured quantity.

    Attributes:
        median: the median of all values.
        p99: the 99th percentile; the maximum while there are fewer than a hundred values.
        n: number of values; 0 if the cell was not measured.
        spread: difference between the highest and the lowest median of a seed.
        medians: of the values with each seed, in the order of the cell's seeds; () in an older
            file, and where the cell was not measured.
    """

    median: float
    p99: float
    n: int
    spread: float
    medians: tuple[float, ...] = ()


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measurement of one route in one cell.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: time per output token.
        quiet_ttft_ms: median TTFT of the same workload when nothing else was served.
        running: mean number of requests that decoded on a decode worker meanwhile.
        qps: turns per second and decode worker that arrived in fact.
        tokens_per_s: output tokens a second of the whole cluster, from the first request to the
            end of the last reply: of each seed, in the cell's order; one value if the cell was not
            measured. Empty in a table that was built without it. Both routes have the same
            arrivals with a seed, so their values of one seed are compared.
    """

    ttft_ms: Statistic
    tpot_ms: Statistic
    quiet_ttft_ms: float
    running: float
    qps: float
    tokens_per_s: tuple[float, ...] = ()

    @property
    def rest_ttft_ms(self) -> float:
        """TTFT at rest: not more than under load, for a quiet run has few turns."""
        return min(self.quiet_ttft_ms, self.ttft_ms.median)


class CellRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a table file.

    Attributes:
        bins: its index on each axis, in the order of ``Axes``.
        remote: the measurement of the remote route.
        local: the measurement of the local route.
        seeds: the seeds it was measured with. Without seeds the cell was not measured, and its
            values are interpolated from the cells around it.
    """

    bins: tuple[int, int, int, int]
    remote: Measured
    local: Measured
    seeds: tuple[int, ...]

    @property
    def measured(self) -> bool:
        """Whether the cell was measured, not interpolated."""
        return bool(self.seeds)


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a table.

    Attributes:
        hardware: the machine that the sweep ran on.
        engine: version of the engine.
        plugin: version of the plugin.
        commit: commit of this repository.
        at: time of day, ISO 8601.
        sweep: the sweep's configuration as it was given.
    """

    hardware: str
    engine: str
    plugin: str
    commit: str
    at: str
    sweep: dict[str, Any]

    @property
    def note(self) -> str:
        """The operator's note on the measurement; "" without one."""
        return str(self.sweep.get("note", ""))


class TableRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a table file.

    Attributes:
        version: the file format, ``VERSION``.
        model: the model's name at the workers; only the last part of a path counts.
        shape: the shape of the cluster, ``1P1D`` for one prefill and one decode worker.
        provenance: the origin of the table.
        prefill_ms_per_token: TTFT that one more token adds to a remote turn, if the prefill
            worker must compute and send it.
        append_ms_per_token: TTFT that one more uncached token adds to a local turn.
        axes: the axes of the table.
        cells: one record for each combination of bins.
        machine: of each worker. None: not told; the provenance has it in words.
    """

    version: int
    model: str
    shape: str
    provenance: Provenance
    prefill_ms_per_token: float
    append_ms_per_token: float
    axes: Axes
    cells: tuple[CellRecord, ...]
    machine: Machine | None = None

    @property
    def digest(self) -> str:
        """Names what was measured, in 12 hexadecimal digits: all but the provenance."""
        read = msgspec.convert(msgspec.to_builtins(self), TableRecord)  # 4 and 4.0 are the same
        measured = msgspec.structs.asdict(read) | {"provenance": None}
        return hashlib.sha256(msgspec.json.encode(measured)).hexdigest()[:12]


def decode(data: bytes) -> TableRecord:
    """Decode a table file; ``problems`` validates its content.

    Raises:
        TableError: ``data`` is no table, or of a format that this version cannot read.
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
    """Iterate over everything that is wrong with a table's content."""
    if not record.model:
        yield "model is empty"
    for name in ("prefill_ms_per_token", "append_ms_per_token"):
        value = getattr(record, name)
        if not 0 < value < math.inf:
            yield f"{name} must be above 0, got {value}"
    if record.machine is not None:
        yield from record.machine.problems()
    axes_valid = True
    for name, bins in record.axes.each():
        for problem in _axis_problems(name, bins):
            axes_valid = False
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
            yield from _seed_problems(where, getattr(cell, route), len(cell.seeds))
    rates = [one.tokens_per_s for cell in record.cells for one in (cell.remote, cell.local)]
    if (missing := rates.count(())) not in (0, len(rates)):
        yield f"tokens_per_s must be given for all cells and routes or for none, {missing} lack it"
    if axes_valid:
        for bins_of in product(*map(range, sizes)):
            if bins_of not in seen:
                yield f"cell {list(bins_of)} is missing"


def _axis_problems(name: str, bins: Sequence[Bin]) -> Iterator[str]:
    if not bins:
        yield f"axis {name} has no bins"
    for i, b in enumerate(bins):
        # Also refuses NaN, for which every comparison is false.
        if not 0 <= b.low <= b.at < b.high < math.inf:
            yield (
                f"axis {name}, bin {i}: 0 <= low <= at < high must hold, got "
                f"{b.low}, {b.at}, {b.high}"
            )
    for i, (before, after) in enumerate(pairwise(bins)):
        if after.low < before.high:
            yield f"axis {name}: bins {i} and {i + 1} overlap ({before.high} and {after.low})"
        elif after.low > before.high:
            yield (
                f"axis {name}: a hole between bins {i} and {i + 1} ({before.high} to {after.low})"
            )


def _cell_problems(where: str, measured: Measured, has_seeds: bool) -> Iterator[str]:
    for name in ("ttft_ms", "tpot_ms"):
        statistic: Statistic = getattr(measured, name)
        if not 0 < statistic.median < math.inf:
            yield f"{where}: {name}.median must be above 0, got {statistic.median}"
        if not statistic.median <= statistic.p99 < math.inf:
            yield f"{where}: {name}.p99 must be at least the median, got {statistic.p99}"
        if not 0 <= statistic.spread < math.inf:
            yield f"{where}: {name}.spread must be 0 or more, got {statistic.spread}"
        if (statistic.n > 0) is not has_seeds:
            expected = "at least 1" if has_seeds else "0, there are no seeds"
            yield f"{where}: {name}.n must be {expected}, got {statistic.n}"
    if not 0 < measured.quiet_ttft_ms < math.inf:
        yield f"{where}: quiet_ttft_ms must be above 0, got {measured.quiet_ttft_ms}"
    for name in ("running", "qps"):
        value = getattr(measured, name)
        if not 0 <= value < math.inf:
            yield f"{where}: {name} must be 0 or more, got {value}"


def _seed_problems(where: str, measured: Measured, seeds: int) -> Iterator[str]:
    of_seeds = {
        "ttft_ms.medians": (measured.ttft_ms.medians, seeds),
        "tpot_ms.medians": (measured.tpot_ms.medians, seeds),
        "tokens_per_s": (measured.tokens_per_s, max(1, seeds)),
    }
    for name, (values, expected) in of_seeds.items():
        if values and len(values) != expected:
            yield f"{where}: {name} must have {expected} values, got {len(values)}"
        for value in values:
            if not 0 < value < math.inf:
                yield f"{where}: {name} must be above 0, got {value}"
