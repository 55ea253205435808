"""The emulated device: a timeline on which steps follow each other, and events on it.

A launch returns at once and moves the end of the timeline, as launching kernels does. An event
records that end, and its ``synchronize`` sleeps until then. So overlap scheduling, chunks and
the pacer meet the waits that they would meet on a GPU. Each step is written to a trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..profiles.profile import Profile, Step
from .collective import Collective
from .knobs import SharedKnobs

_POLL_S = 0.001  # of an event that is asked again and again
# The host's time to launch the first step of an idle device. A GPU's host needs it, too, and slow
# motion does not scale it.
_LAUNCH_S = 0.015


@dataclass(frozen=True, slots=True)
class Work:
    """Who is in the next step, as the scheduler has planned it.

    Attributes:
        requests: their ids.
        queued_s: when the first of them could have run; 0: not known.
    """

    requests: frozenset[str]
    queued_s: float


class Device:
    """One emulated GPU, or the GPUs of one tensor-parallel worker.

    Args:
        trace: file that gets a line for each step.
        clock: seconds, the same in all processes of the machine.
    """

    def __init__(
        self,
        profile: Profile,
        knobs: SharedKnobs,
        trace: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self.knobs = knobs
        self.free_at_s = 0.0
        self._clock = clock
        self._sleep = sleep
        self._trace = trace.open("a", buffering=1)  # a line at a time
        self._work = Work(frozenset(), 0.0)
        self._before: Collection[str] = frozenset()
        self._late_s = 0.0  # the latest wake-up since the last step
        self._collective: Collective | None = None

    def join(self, collective: Collective) -> None:
        """Have all later steps be those of several ranks together."""
        self._collective = collective

    def close(self) -> None:
        """Close the trace."""
        self._trace.close()

    def plan(self, work: Work) -> None:
        """Note what the next step has in it, so that idle time can be told from waiting."""
        self._work = work

    def launch(self, step: Step, share: float = 1.0) -> None:
        """Add a step to the timeline.

        Args:
            share: of the time of such a step, that a draft takes.

        Raises:
            OutsideProfileError: the profile has no time for it.
        """
        now_s, slow_motion = self._clock(), self.knobs.slow_motion
        ms = share * self.profile.step_ms(step)
        bubble_s = self._bubble_s(now_s)
        start_s = self._extend(now_s, ms * slow_motion / 1e3)
        self._trace.write(
            json.dumps(
                {
                    "start_s": round(start_s, 6),
                    "end_s": round(self.free_at_s, 6),
                    "ms": round(ms, 4),
                    "slow_motion": slow_motion,
                    "extends": [[one.new_tokens, one.cached_tokens] for one in step.extends],
                    "sequences": step.sequences,
                    "context_tokens": step.context_tokens,
                    "width": step.width,
                    "share": share,
                    "bubble_s": round(bubble_s, 6),
                    "late_s": round(self._late_s, 6),
                    "covered": self.profile.covers(step),
                }
            )
            + "\n"
        )
        self._before, self._late_s = self._work.requests, 0.0

    def launch_nothing(self) -> None:
        """Take part in a step of other ranks, if there are any."""
        if self._collective is not None:
            self._extend(self._clock(), 0.0)

    def _extend(self, now_s: float, takes_s: float) -> float:
        """Add a step to the end of the timeline; return when it begins."""
        start_s = max(now_s, self.free_at_s)
        if self._collective is not None:
            start_s, takes_s = self._collective.agree(start_s, takes_s)
        self.free_at_s = start_s + takes_s
        return start_s

    def _bubble_s(self, now_s: float) -> float:
        """How long the device has been idle while the next step could have run."""
        runnable_s = self._work.queued_s
        if not self._work.requests.isdisjoint(self._before):
            runnable_s = self.free_at_s
        elif runnable_s > self.free_at_s:
            runnable_s += _LAUNCH_S
        return max(0.0, now_s - max(self.free_at_s, runnable_s)) if runnable_s else 0.0

    def wait_until(self, at_s: float) -> None:
        """Sleep until a point of the timeline."""
        left_s = at_s - self._clock()
        if left_s <= 0:
            return
        self._sleep(left_s)
        self._late_s = max(self._late_s, self._clock() - at_s)

    def has_passed(self, at_s: float) -> bool:
        """Whether a point of the timeline has passed; if not, a poll takes a millisecond."""
        left_s = at_s - self._clock()
        if left_s > 0:
            self._sleep(min(left_s, _POLL_S))
        return left_s <= 0


def event_class(device: Device) -> type[Any]:
    """Return a stand-in of ``torch.cpu.Event`` that waits for a device's timeline."""

    class DeviceEvent:
        """A point of the timeline; one that was never recorded has passed."""

        def __init__(self, *_: object, **__: object) -> None:
            self._at_s = 0.0

        def record(self, stream: object = None) -> None:
            """Remember the end of all that was launched."""
            self._at_s = device.free_at_s

        def query(self) -> bool:
            """Whether the device has got so far."""
            return device.has_passed(self._at_s)

        def synchronize(self) -> None:
            """Wait until the device has got so far."""
            device.wait_until(self._at_s)

        def wait(self, stream: object = None) -> None:
            """Have a stream wait; all streams share the timeline, so it does already."""

    return DeviceEvent
