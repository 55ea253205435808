"""Progress of a build on stderr: a bar for each stage on a terminal, elsewhere a line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

_TICK_S = 0.5
_UNKNOWN_TOTAL = "{desc}: {elapsed}"  # format of a stage without a known total


class Bars:
    """The progress display; an instance is the ``progress`` callback of a build."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._stage = ""
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show progress.

        Args:
            stage: name of the build's stage.
            done: rows done in this stage.
            total: rows of this stage; 0: unknown.
        """
        if not sys.stderr.isatty():
            if stage != self._stage:
                print(f"ppd-pool: {stage}", file=sys.stderr, flush=True)
            self._stage = stage
            return
        with self._lock:
            if stage != self._stage:
                self._close()
                self._bar = (
                    tqdm(desc=stage, total=total, unit_scale=True, unit=" rows")
                    if total
                    else tqdm(desc=stage, bar_format=_UNKNOWN_TOTAL)
                )
            self._stage = stage
            if self._bar is not None and total:
                self._bar.update(done - self._bar.n)

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Refresh the elapsed time while the context is open, and close the bar at its end."""
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(ended,), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join()
            self._close()

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            with self._lock:
                if self._bar is not None:
                    self._bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
