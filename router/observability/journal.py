"""Decisions kept: the last ones for ``/explain``, all of them in the decision log."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO

from ppd.errors import ConfigError
from ppd.journal import VERSION, Decided, Event, Finished, Opened, Reset, to_line

from ..config.options import RouterConfig
from ..config.tables import TableFile

_RECENT = 1000

logger = logging.getLogger("ppd.router.journal")


@dataclass(slots=True)
class Explained:
    """A decision and, once it has ended, what came of it."""

    decided: Decided
    finished: Finished | None = None


class Journal:
    """Args:
    path: of the decision log, continued if it exists; "": none is written.

    Raises:
        ConfigError: the log cannot be opened.
    """

    def __init__(self, path: str, opened: Opened) -> None:
        self._numbers = count(1)
        self._recent: dict[int, Explained] = {}  # by consecutive numbers
        self._file: IO[bytes] | None = None
        if path:
            try:
                self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - lives as long
                _end_last_line(self._file)
            except OSError as error:
                raise ConfigError(f"the decision log cannot be written: {error}") from error
        self._write(opened)

    def opened(self, event: Opened) -> None:
        """From here on another policy decides."""
        self._write(event)

    def next_number(self) -> int:
        return next(self._numbers)

    def decided(self, event: Decided) -> None:
        self._recent[event.number] = Explained(event)
        self._recent.pop(event.number - _RECENT, None)
        self._write(event)

    def finished(self, event: Finished) -> None:
        if (one := self._recent.get(event.number)) is not None:  # else it was long ago
            one.finished = event
        self._write(event)

    def reset(self, event: Reset) -> None:
        self._write(event)

    def recent(self, limit: int, session: str | None) -> list[Explained]:
        """The newest first."""
        chosen: list[Explained] = []
        for one in reversed(self._recent.values()):
            features = one.decided.features
            if session is None or (features is not None and features.session == session):
                chosen.append(one)
                if len(chosen) == limit:
                    break
        return chosen

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, event: Event) -> None:
        if self._file is None:
            return
        line = to_line(event)
        try:
            # Unbuffered: nothing is lost if we are killed. Some microseconds, into the page cache.
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError as error:  # which must not cost requests
            logger.error("the decision log ends here: %s", error)
            self._file.close()
            self._file = None


def opened_by(config: RouterConfig, table: TableFile | None) -> Opened:
    """How a run begins."""
    return Opened(
        version=VERSION,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=config.policy,
        corrections=tuple(sorted(config.corrections)),
        append_budget_tokens=config.append_budget_tokens,
        table=table.digest if table else "",
    )


def _end_last_line(file: IO[bytes]) -> None:
    """After a kill in mid-write: what follows must not be glued to it."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
