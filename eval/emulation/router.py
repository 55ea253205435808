"""``python -m eval.emulation.router K ...``: ``ppd-router`` with clocks that are K times slower.

All that an emulated cluster does takes K times as long. By these clocks the rates and times that
the router measures are those of the emulated cluster, as its tables' are. Requests may wait K times
as long, too. What the router waits for by itself keeps real time: probes of workers, pauses before
retries, handshakes.
"""

from __future__ import annotations

import sys
import tempfile
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
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(patience(slow_motion))
        config.flush()
        # By its installed name.
        import_module("ppd_router.cli").main(["--config", config.name, *argv[1:]])


def patience(slow_motion: float) -> str:
    """Return a configuration of the router with limits of requests that are so many times longer.

    They are those on answers of workers and on the queue for admission.
    """
    usual = import_module("ppd_router.config.options").RouterConfig()
    return (
        f"answer_timeout_s = {usual.answer_timeout_s * slow_motion}\n"
        f"idle_timeout_s = {usual.idle_timeout_s * slow_motion}\n"
        f"[admission]\nmax_wait_s = {usual.admission.max_wait_s * slow_motion}\n"
    )


def _slowed(clock: Callable[[], float], by: float) -> Callable[[], float]:
    return lambda: clock() / by


if __name__ == "__main__":
    main(sys.argv[1:])
