"""Step traces of emulated workers: what the device did, and whether a run may count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.errors import PpdError

MAX_BUBBLE_SHARE = 0.02
MAX_STALL_MS = 5.0  # on the emulated device's clock
MAX_STALLED = 0.001  # of a run's steps, that may begin later than that


class RefusedRunError(PpdError):
    """The times of a run do not count, mostly as the machine was too slow for its slow motion."""


class TracedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step; seconds are the machine's, milliseconds the device's.

    Attributes:
        width: tokens of each sequence that decodes.
        share: of the time of such a step; below 1 for a draft's.
        bubble_s: how long the device was idle although the step could have run.
        late_s: by how much the host woke up late before it.
        covered: whether the shape lies in the profile's range.
    """

    start_s: float
    end_s: float
    ms: float
    slow_motion: float
    extends: list[tuple[int, int]]
    sequences: int
    context_tokens: int
    width: int
    share: float
    bubble_s: float
    late_s: float
    covered: bool


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the devices did in an interval.

    Attributes:
        busy_ms: of each worker, on the device's clock.
        bubble_share: idle time with runnable work, of that and the busy time; the worst worker's.
        longest_stall_ms: on the device's clock: a late wake-up, or one idle gap.
        stalled: steps that began more than ``MAX_STALL_MS`` late.
        continued: steps beyond the profile's range, for which it was continued.
    """

    steps: int
    busy_ms: dict[str, float]
    bubble_share: float
    longest_stall_ms: float
    stalled: int
    continued: int

    def fields(self) -> dict[str, object]:
        """Return the fields of a row that tell how well the machine kept up."""
        return {
            "bubble_share": round(self.bubble_share, 5),
            "longest_stall_ms": round(self.longest_stall_ms, 3),
            "stalled_steps": self.stalled,
            "continued_steps": self.continued,
        }

    def require_valid(self) -> None:
        """Refuse the run if its times do not count.

        Raises:
            RefusedRunError: the device was idle too long, or the host stalled too often.
        """
        if self.bubble_share > MAX_BUBBLE_SHARE:
            raise RefusedRunError(
                f"the device was idle for {self.bubble_share:.1%} of the time with work queued, "
                f"{MAX_BUBBLE_SHARE:.0%} at most: more slow motion is needed"
            )
        if self.stalled > MAX_STALLED * self.steps:
            raise RefusedRunError(
                f"the host stalled for more than {MAX_STALL_MS:g} ms of the device's time at "
                f"{self.stalled} of {self.steps:,} steps, for {self.longest_stall_ms:.1f} at "
                f"most; {MAX_STALLED:.1%} of the steps are allowed: repeat on a quieter machine"
            )


def read_steps(path: Path) -> Iterator[TracedStep]:
    """Yield the steps of a trace; a last line that is being written is left out."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=TracedStep)


def device_use(folder: Path, from_s: float, to_s: float) -> DeviceUse:
    """Return what the devices of all workers did in an interval of ``time.monotonic``."""
    steps = stalled = continued = 0
    worst_share = stall_ms = 0.0
    busy_ms: dict[str, float] = defaultdict(float)
    for path in sorted(folder.glob("*.jsonl")):
        worker = path.stem.rpartition("-")[0]
        own = [step for step in read_steps(path) if from_s <= step.start_s < to_s]
        busy_s = sum(step.end_s - step.start_s for step in own)
        bubble_s = sum(step.bubble_s for step in own)
        if own:
            worst_share = max(worst_share, bubble_s / (busy_s + bubble_s))
        for step in own:
            late_ms = 1e3 * max(step.bubble_s, step.late_s) / step.slow_motion
            stall_ms, stalled = max(stall_ms, late_ms), stalled + (late_ms > MAX_STALL_MS)
            busy_ms[worker] += step.ms
            continued += not step.covered
        steps += len(own)
    return DeviceUse(steps, dict(busy_ms), worst_share, stall_ms, stalled, continued)


def extends_of(folder: Path, worker: str, from_s: float) -> int:
    """Return how many sequences a worker has prefilled since a second of ``time.monotonic``."""
    return sum(
        len(step.extends)
        for path in folder.glob(f"{worker}-*.jsonl")
        for step in read_steps(path)
        if step.start_s >= from_s
    )
