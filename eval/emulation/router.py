"""``python -m eval.emulation.router K TOML ...``: ``ppd-router`` with clocks K times slower.

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
        argv: the slow motion, lines of the router's configuration, and its own arguments.
    """
    slow_motion, settings, own = float(argv[0]), argv[1], argv[2:]
    time.monotonic = _slowed(time.monotonic, slow_motion)
    time.perf_counter = _slowed(time.perf_counter, slow_motion)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(configuration(slow_motion, settings))
        config.flush()
        # By its installed name.
        import_module("ppd_router.cli").main(["--config", config.name, *own])


def configuration(slow_motion: float, settings: str) -> str:
    """Return the router's configuration file.

    Its limits on answers of workers and on the queue for admission are as much longer.

    Args:
        settings: further lines, of the top level.
    """
    usual = import_module("ppd_router.config.options").RouterConfig()
    return (
        f"{settings}\n"
        f"answer_timeout_s = {usual.answer_timeout_s * slow_motion}\n"
        f"idle_timeout_s = {usual.idle_timeout_s * slow_motion}\n"
        f"[admission]\nmax_wait_s = {usual.admission.max_wait_s * slow_motion}\n"
    )


def _slowed(clock: Callable[[], float], by: float) -> Callable[[], float]:
    return lambda: clock() / by


if __name__ == "__main__":
    main(sys.argv[1:])
