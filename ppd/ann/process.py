"""What a process that runs engines in threads asks of the interpreter and of the kernel."""

from __future__ import annotations

import gc
import os
import sys

_SWITCH_S = 2e-4  # an engine that comes back from compiled code does not wait longer for the GIL


def settle() -> None:
    """When all is loaded and compiled, before the first search comes.

    The garbage collector looks no more at what is there by then: compilers leave so many objects
    behind that a look takes 0.1 s.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()


def own_cores(engines: int) -> list[int] | None:
    """One for each, if there are exactly as many."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) == engines else None


def stay_on(core: int) -> None:
    """The thread that calls this runs nowhere else from now on.

    Left to itself, Linux runs two engines that have just been woken on one core for some
    milliseconds, one after the other, while another core is idle.
    """
    os.sched_setaffinity(0, {core})
