"""How far a build is: a bar for each of its stages on a terminal, elsewhere a line for each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

_TICK_S = 0.5
_OF_UNKNOWN = "{desc}: {elapsed}"  # how much there is to do


class Bars:
    """Called with a stage, how much of it is done, and of how much (0: nobody can tell)."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._stage = ""
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, of: int) -> None:
        if not sys.stderr.isatty():
            if stage != self._stage:
                print(f"ppd-pool: {stage}", file=sys.stderr, flush=True)
            self._stage = stage
            return
        with self._lock:
            if stage != self._stage:
                self._close()
                self._bar = (
                    tqdm(desc=stage, total=of, unit_scale=True, unit=" rows")
                    if of
                    else tqdm(desc=stage, bar_format=_OF_UNKNOWN)
                )
            self._stage = stage
            if self._bar is not None and of:
                self._bar.update(done - self._bar.n)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While it is, clocks tick."""
        over = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(over,), daemon=True)
        ticking.start()
        try:
            yield
        finally:
            over.set()
            ticking.join()
            self._close()

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(_TICK_S):
            with self._lock:
                if self._bar is not None:
                    self._bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
