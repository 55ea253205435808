"""Settings of the interpreter and the kernel for a process that runs engines in threads."""

from __future__ import annotations

import gc
import os
import sys

_SWITCH_S = 2e-4  # maximum wait for the GIL of an engine that returns from compiled code


def settle() -> None:
    """Prepare the interpreter for searches, once all code is loaded and compiled.

    Existing objects are excluded from garbage collection. Compilers leave so many objects behind
    that a full collection takes 0.1 s.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()


def own_cores(engines: int) -> list[int] | None:
    """The cores to pin engines to: one per engine; None if their numbers differ."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) == engines else None


def stay_on(core: int) -> None:
    """Pin the calling thread to a core.

    Without this, Linux may run two engines that were just woken on one core, while another core
    is idle for some milliseconds.
    """
    os.sched_setaffinity(0, {core})
