"""The decision table: the costs of both routes of a later turn, looked up by workload.

This module owns the lookup. ``ppd.score`` compares costs, ``ppd.table_file`` owns the file format,
and ``eval`` builds tables.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean, stdev

from ppd.decode_waits import DecodeWaits
from ppd.errors import TableError
from ppd.interpolation import between
from ppd.prefill_times import prefill_times
from ppd.table_file import (
    Axes,
    CellRecord,
    Measured,
    Statistic,
    TableRecord,
    decode,
    problems,
)

_TRAINED = re.compile(r"-(Instruct|Chat|Base|hf|it)(?=-|$)")
_MAX_PROBLEMS = 20  # in one message
# The mean range of n normal values, in standard deviations.
_RANGE = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970}
_UNKNOWN_NOISE = 0.05  # relative; one seed has no measurable spread


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a route.

    Attributes:
        ttft_ms: median time to the first token.
        tpot_ms: median time per output token.
        ttft_tail: 99th percentile of TTFT, divided by its median.
        tpot_tail: 99th percentile of TPOT, divided by its median.
        tokens_per_s: throughput of the cluster, in output tokens a second: the geometric mean of
            the seeds; 0 if it is unknown.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_tail: float
    tpot_tail: float
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Noise:
    """The uncertainty of a cell: relative standard errors of its quotients, local over remote."""

    ttft: float
    tpot: float
    throughput: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table, in the form that decisions use.

    Attributes:
        index: its position in ``Table.cells``.
        label: its bins, in the form of log lines.
        remote: measured costs of the remote route.
        local: measured costs of the local route.
        noise: the uncertainty of the measurement.
        by_seed: costs of the remote and of the local route with each seed; () in an older table.
        running: mean number of requests in a decode worker's batch during the remote run.
        quiet_remote_ms: TTFT of the remote route when no other request waits.
        quiet_local_ms: TTFT of the local route when no other request waits.
    """

    index: int
    label: str
    remote: Costs
    local: Costs
    noise: Noise
    by_seed: tuple[tuple[Costs, Costs], ...]
    running: float
    quiet_remote_ms: float
    quiet_local_ms: float


class Table:
    """A valid decision table.

    Args:
        record: the content of a table file.

    Attributes:
        cells: all cells, in the order of their indices.
        empty_append_ms: what a local turn at rest would take without a new token: a step, HTTP and
            the tokenizer.
        min_step_ms: the least TPOT of a cell, of either route.
        token_ms: time to prefill a token, at most; KV transfer is not in it.
        prefill_times: of prefill workers.
        decode_waits: of turns whose home decodes.
        has_throughput: whether its cells hold the throughput of both routes.

    Raises:
        TableError: the record is not valid. The message names every problem.
    """

    def __init__(self, record: TableRecord) -> None:
        if found := list(problems(record)):
            more = len(found) - _MAX_PROBLEMS
            listed = found[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
            raise TableError("; ".join(listed))
        self.record = record
        axes = [bins for _, bins in record.axes.each()]
        self._lows = tuple(tuple(b.low for b in bins) for bins in axes)
        self._highs = tuple(bins[-1].high for bins in axes)
        self._points = tuple(tuple(b.at for b in bins) for bins in axes)
        self._log_points = tuple(tuple(map(math.log1p, points)) for points in self._points)
        sizes = [len(bins) for bins in axes]
        self._strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        by_bins: dict[tuple[int, ...], CellRecord] = {c.bins: c for c in record.cells}
        self.cells = tuple(
            _cell(i, record.axes, by_bins[bins])
            for i, bins in enumerate(product(*map(range, sizes)))
        )
        self.token_ms = min(record.prefill_ms_per_token, record.append_ms_per_token)
        self.has_throughput = all(cell.remote.tokens_per_s for cell in self.cells)
        self._quiet = [self._mean_quiet(i, sizes[2]) for i in range(math.prod(sizes[:3]))]
        self.min_step_ms = min(min(c.remote.tpot_ms, c.local.tpot_ms) for c in self.cells)
        self.decode_waits = DecodeWaits(record, self.min_step_ms)
        self.empty_append_ms = self._empty_append_ms()
        self.prefill_times = prefill_times(
            [tokens.at for tokens in record.axes.context_tokens],
            [tokens.at for tokens in record.axes.new_tokens],
            lambda context, new: self.quiet_ttft_ms(context, new, 0)[1],
            record.append_ms_per_token,
            record.prefill_ms_per_token,
        )

    def _mean_quiet(self, number: int, replies: int) -> tuple[float, float]:
        """Geometric means of both quiet TTFTs: remote ones over rates, local ones over replies.

        Args:
            number: of the three bins of tokens.
            replies: bins of output tokens.
        """
        rates, without_reply = self._strides[2], number - number % replies
        first = number * rates
        of_reply = self.cells[first : first + rates]
        of_all = self.cells[without_reply * rates : (without_reply + replies) * rates]
        return (
            geometric_mean(cell.quiet_remote_ms for cell in of_reply),
            geometric_mean(cell.quiet_local_ms for cell in of_all),
        )

    def _empty_append_ms(self) -> float:
        fewest = self.record.axes.new_tokens[0].at
        (_, shortest_ms) = self.quiet_ttft_ms(0, fewest, 0)
        return max(self.min_step_ms, shortest_ms - fewest * self.record.append_ms_per_token)

    @classmethod
    def parse(cls, data: bytes) -> Table:
        """Parse the content of a table file.

        Raises:
            TableError: ``data`` is no valid table, or of a format that this version cannot read.
        """
        return cls(decode(data))

    def require(self, models: Sequence[str]) -> None:
        """Check that the table was measured with the model that is served.

        Args:
            models: the names of the served model.

        Raises:
            TableError: the table was measured with another model.
        """
        if not self.is_for(models):
            raise TableError(
                f"it was measured with {self.record.model}, the workers serve {', '.join(models)}"
            )

    def require_throughput(self) -> None:
        """Check that a weight of throughput has something to weigh.

        Raises:
            TableError: the table has no throughput.
        """
        if not self.has_throughput:
            raise TableError(
                "it has no throughput: build it anew from the rows of its sweep (ppd-eval table "
                "build), or weigh no throughput"
            )

    def is_for(self, models: Sequence[str]) -> bool:
        """Whether the table was measured with the model that is served under these names.

        One of a machine holds for all models of its model's shape: training does not change times.
        """
        named = base_name if self.record.machine is None else shape_name
        return named(self.record.model) in map(named, models)

    def find(self, context: float, new: float, output: float, qps: float) -> Cell | None:
        """The cell of a workload; None if a value lies beyond its axis.

        Args:
            context: tokens of KV before the turn.
            new: tokens that the turn adds.
            output: tokens of the reply.
            qps: turns per second and decode worker.
        """
        at = (context, new, output, qps)
        index = 0
        for value, lows, high, stride in zip(
            at, self._lows, self._highs, self._strides, strict=True
        ):
            if not value < high:
                return None
            below = bisect_right(lows, value)
            if not below:
                return None
            index += (below - 1) * stride
        return self.cells[index]

    def quiet_ttft_ms(self, context: float, new: float, reply: float) -> tuple[float, float]:
        """Interpolate the TTFT of a turn that nothing waits for, linear in tokens, as a forward is.

        In a sweep all replies of a run have one length, so the axis of output tokens is that of the
        reply before the turn, too.

        Args:
            context: tokens of KV before the turn.
            new: tokens that the turn adds.
            reply: tokens at the end of the context that the prefill worker has not computed; beyond
                the last point each one takes ``token_ms``.

        Returns:
            Of the remote and of the local route.
        """
        remote = local = 0.0
        for index, weight in self._corners(self._points, (context, new, reply)):
            remote_ms, local_ms = self._quiet[index // self._strides[2]]
            remote += weight * remote_ms
            local += weight * local_ms
        beyond = max(0.0, reply - self.record.axes.output_tokens[-1].at)
        return remote + beyond * self.token_ms, local

    def _corners(
        self, axes: Sequence[Sequence[float]], values: Sequence[float]
    ) -> list[tuple[int, float]]:
        """Cells around values of the first axes, in the first bins of the others, with weights.

        Args:
            axes: the points of all axes.
            values: in the unit of the points.
        """
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for value, points, stride in zip(values, axes, self._strides, strict=False):
            low, share = between(points, value)
            corners = [
                (index + (low + step) * stride, weight * part)
                for index, weight in corners
                for step, part in ((0, 1.0 - share), (1, share))
                if part > 0.0
            ]
        return corners

    def interpolate(
        self, context: float, new: float, output: float, qps: float
    ) -> tuple[Costs, Costs]:
        """Interpolate the costs of a workload between the points where cells were measured.

        The interpolation is linear in the logarithms of axes and costs, so a cost is never
        negative. Beyond the outermost points the costs are those of the nearest cell.

        Args:
            context: tokens of KV before the turn.
            new: tokens that the turn adds.
            output: tokens of the reply.
            qps: turns per second and decode worker.

        Returns:
            The costs of the remote and of the local route.
        """
        logs = [math.log1p(value) for value in (context, new, output, qps)]
        corners = self._corners(self._log_points, logs)
        if len(corners) == 1:
            cell = self.cells[corners[0][0]]
            return cell.remote, cell.local
        blend = [(weight, self.cells[index]) for index, weight in corners]
        return (
            _blend([(weight, cell.remote) for weight, cell in blend]),
            _blend([(weight, cell.local) for weight, cell in blend]),
        )


def base_name(model: str) -> str:
    """A model's name without its folders, which may differ between workers."""
    return model.rstrip("/").rpartition("/")[2]


def shape_name(model: str) -> str:
    """A model's name without what names its training: ``Llama-3.1-8B``.

    A quantization stays in the name: it changes times.
    """
    return _TRAINED.sub("", base_name(model).removeprefix("Meta-"))


def _blend(parts: Sequence[tuple[float, Costs]]) -> Costs:
    log, exp = math.log, math.exp
    ttft = tpot = ttft_tail = tpot_tail = rate = 0.0
    for weight, costs in parts:
        ttft += weight * log(costs.ttft_ms)
        tpot += weight * log(costs.tpot_ms)
        ttft_tail += weight * costs.ttft_tail
        tpot_tail += weight * costs.tpot_tail
        rate += weight * costs.tokens_per_s
    return Costs(exp(ttft), exp(tpot), ttft_tail, tpot_tail, rate)


def _cell(index: int, axes: Axes, record: CellRecord) -> Cell:
    named = zip(axes.each(), record.bins, strict=True)
    label = " ".join(
        f"{name.removesuffix('_tokens')}=[{bins[i].low:g},{bins[i].high:g})"
        for (name, bins), i in named
    )
    return Cell(
        index=index,
        label=label,
        remote=_costs(record.remote),
        local=_costs(record.local),
        noise=_noise(record),
        by_seed=_by_seed(record),
        running=record.remote.running,
        quiet_remote_ms=record.remote.rest_ttft_ms,
        quiet_local_ms=record.local.rest_ttft_ms,
    )


def _costs(measured: Measured) -> Costs:
    ttft, tpot, rates = measured.ttft_ms, measured.tpot_ms, measured.tokens_per_s
    tails = (ttft.p99 / ttft.median, tpot.p99 / tpot.median)
    return Costs(ttft.median, tpot.median, *tails, geometric_mean(rates) if rates else 0.0)


def _by_seed(record: CellRecord) -> tuple[tuple[Costs, Costs], ...]:
    routes = (record.remote, record.local)
    if not all(route.ttft_ms.medians and route.tpot_ms.medians for route in routes):
        return ()
    return tuple(zip(_of_seeds(record.remote), _of_seeds(record.local), strict=True))


def _of_seeds(measured: Measured) -> Iterator[Costs]:
    tails = _costs(measured)  # those of all seeds
    medians = zip(measured.ttft_ms.medians, measured.tpot_ms.medians, strict=True)
    for number, (ttft_ms, tpot_ms) in enumerate(medians):
        rate = measured.tokens_per_s[number] if measured.tokens_per_s else 0.0
        yield Costs(ttft_ms, tpot_ms, tails.ttft_tail, tails.tpot_tail, rate)


def _noise(record: CellRecord) -> Noise:
    """Estimate the noise of a cell from the spread of its seeds' medians."""
    remote, local, seeds = record.remote, record.local, len(record.seeds)
    return Noise(
        ttft=math.hypot(_error(remote.ttft_ms, seeds), _error(local.ttft_ms, seeds)),
        tpot=math.hypot(_error(remote.tpot_ms, seeds), _error(local.tpot_ms, seeds)),
        throughput=_error_of_ratio(remote.tokens_per_s, local.tokens_per_s),
    )


def _error_of_ratio(remote: Sequence[float], local: Sequence[float]) -> float:
    """The standard error of the mean log ratio of both routes' values with the same seed."""
    if len(remote) < 2:
        return _UNKNOWN_NOISE
    ratios = [math.log(b / a) for a, b in zip(remote, local, strict=True)]
    return stdev(ratios) / math.sqrt(len(ratios))


def _error(statistic: Statistic, seeds: int) -> float:
    """The standard error of a median, as a share of it."""
    if seeds < 2:
        return _UNKNOWN_NOISE
    deviation = statistic.spread / _RANGE.get(seeds, 3.1)
    return deviation / math.sqrt(seeds) / statistic.median
