"""What a turn waits for the decodes of its home, from the cells of a decision table.

A decode worker serves one forward after the other. So a turn waits until steps end that it has no
part in, and its first token comes later than at rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from ppd.interpolation import between
from ppd.table_file import CellRecord, Measured, TableRecord

_MOSTLY_BUSY = (2.0, 0.5)  # requests that decode on a worker, in the mean; rather the first
_TURNS = 2  # of a conversation of a sweep that does not name them
_MOSTLY_IDLE = 0.3  # share of the time that a prefill worker computes
_SHAPE = re.compile(r"(\d+)P(\d+)D(?:\d+R)?")
# With overlap scheduling a prefill beside decodes waits for half of the step that runs, on average,
# and for one that has been launched.
_APPEND_WAIT_STEPS = 1.5
_REMOTE_WAIT_STEPS = 0.5  # KV that has arrived is taken up when the decode step ends
_LEAST_WAIT_STEPS = 0.5  # of either route: the rest of the step that runs


class DecodeWaits:
    """The waits of both routes, by the tokens that are computed.

    Args:
        record: the table.
        min_step_ms: the time of a decode step, at least.
    """

    def __init__(self, record: TableRecord, min_step_ms: float) -> None:
        self._points = [tokens.at for tokens in record.axes.new_tokens]
        self._steps = _measured_steps(record, min_step_ms)
        self._min_step_ms = min_step_ms

    def added_ttft_ms(self, new: float, appended: float, step_ms: float) -> tuple[float, float]:
        """What decodes on its home add to the TTFT of a turn.

        It waits for some steps. An append's own step decodes the batch, too. So that one takes as
        much longer as a step of decodes alone.

        Args:
            new: tokens that the turn adds.
            appended: tokens that a local turn computes.
            step_ms: time of a decode step.

        Returns:
            Of the remote and of the local route.
        """
        own_ms = max(0.0, step_ms - self._min_step_ms)
        return (
            self._remote_steps(new) * step_ms,
            self._local_steps(appended) * step_ms + own_ms,
        )

    def _remote_steps(self, new: float) -> float:
        """Interpolate how many decode steps a remote turn waits for, linear in tokens."""
        below, share = between(self._points, new)
        steps, _ = self._steps[below]
        if share:
            steps += share * (self._steps[below + 1][0] - steps)
        return steps

    def _local_steps(self, appended: float) -> float:
        """Interpolate how many decode steps an append waits for, linear in tokens.

        Decodes run between the chunks of an append, so its waits grow from its second chunk on.
        Where that is, no point shows. Below the second point waits are those of the first, until
        the line through the second and the third point gives more.
        """
        points = self._points
        below, share = between(points, appended)
        _, steps = self._steps[below]
        if not share:
            return steps
        _, more = self._steps[below + 1]
        linear = steps + share * (more - steps)
        if below + 2 == len(points):
            return linear
        by_token = (self._steps[below + 2][1] - more) / (points[below + 2] - points[below + 1])
        return min(linear, max(steps, more - by_token * (points[below + 1] - appended)))


def _measured_steps(record: TableRecord, min_step_ms: float) -> list[tuple[float, float]]:
    """Measure how many decode steps remote and local turns wait for beside decodes.

    They are medians over the cells of a bin of new tokens whose home mostly decoded. Remote turns
    are those of a prefill worker that was mostly idle: its queue is counted by itself. So are
    appends that others wait for: local turns are those at the least rate of arrivals. Large appends
    wait for many steps, because chunks are bounded there. A bin without such a cell has the waits
    of the one below, and the first one those of overlap scheduling.

    Args:
        record: the table.
        min_step_ms: the time of a decode step, at least.
    """
    remote, local = _REMOTE_WAIT_STEPS, _APPEND_WAIT_STEPS
    found = []
    for new in range(len(record.axes.new_tokens)):
        cells = [cell for cell in record.cells if cell.bins[1] == new and cell.seeds]
        idle = [cell for cell in cells if _prefill_use(record, cell) <= _MOSTLY_IDLE]
        if busy := _mostly_busy(idle):
            remote = median(_waited(cell.remote, cell, 0.0) for cell in busy)
        if busy := _mostly_busy(cells):
            least = min(cell.bins[3] for cell in busy)
            local = median(
                _waited(cell.local, cell, cell.local.tpot_ms.median - min_step_ms)
                for cell in busy
                if cell.bins[3] == least
            )
        found.append((max(_LEAST_WAIT_STEPS, remote), max(_LEAST_WAIT_STEPS, local)))
    return found


def _mostly_busy(cells: Sequence[CellRecord]) -> list[CellRecord]:
    """The cells whose home mostly decoded; none if there is none."""
    for least in _MOSTLY_BUSY:
        if busy := [cell for cell in cells if cell.remote.running >= least]:
            return busy
    return []


def _prefill_use(record: TableRecord, cell: CellRecord) -> float:
    """Share of the time that a prefill worker computed in a cell's remote run, nearly.

    All turns of a conversation together compute the last one's context and new tokens.
    """
    context, new = record.axes.context_tokens[cell.bins[0]], record.axes.new_tokens[cell.bins[1]]
    shape = _SHAPE.fullmatch(record.shape)
    homes = int(shape[2]) / max(1, int(shape[1])) if shape else 1.0  # of a prefill worker
    turns = record.provenance.sweep.get("turns")
    turns = turns if isinstance(turns, int) and turns > 0 else _TURNS
    a_turn_ms = (context.at + new.at) / turns * record.prefill_ms_per_token
    return homes * cell.remote.qps * a_turn_ms / 1e3


def _waited(measured: Measured, cell: CellRecord, own_ms: float) -> float:
    """Divide by a step what turns took longer beside decodes, less ``own_ms``."""
    longer_ms = measured.ttft_ms.median - measured.rest_ttft_ms
    busy_ms = longer_ms / (1.0 - math.exp(-cell.remote.running))
    return (busy_ms - own_ms) / measured.tpot_ms.median
