"""``python -m eval.emulation.router K ...``: ``ppd-router`` with clocks that are K times slower.

All that an emulated cluster does takes K times as long. By these clocks the rates and times that
the router measures are those of the emulated cluster, as its tables' are. What it waits for by
itself keeps real time: probes of workers, pauses before retries, timeouts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> None:
    """Run the router.

    Args:
        argv: the slow motion, and the router's own arguments.
    """
    slow_motion = float(argv[0])
    time.monotonic = _slowed(time.monotonic, slow_motion)
    time.perf_counter = _slowed(time.perf_counter, slow_motion)
    import_module("ppd_router.cli").main(argv[1:])  # by its installed name


def _slowed(clock: Callable[[], float], by: float) -> Callable[[], float]:
    return lambda: clock() / by


if __name__ == "__main__":
    main(sys.argv[1:])
