"""The journal of decisions: the latest ones in memory, all of them in the decision log."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO

from ppd.errors import ConfigError
from ppd.journal import VERSION, Decided, Event, Finished, Opened, Reset, to_line

from ..config.options import RouterConfig
from ..config.table_files import TableFile
from .batch import LineBatch

_RECENT = 1000

logger = logging.getLogger("ppd.router.journal")


@dataclass(slots=True)
class DecisionRecord:
    """A decision and its outcome.

    Attributes:
        decided: the decision.
        finished: the outcome; None until the request has ended.
    """

    decided: Decided
    finished: Finished | None = None


class Journal:
    """The latest decisions for ``/explain``, and the decision log.

    Decisions and outcomes are written in batches (``LineBatch``), all other events at once.

    Args:
        path: of the decision log, which is continued if it exists; "": none is written.
        opened: the log's first event.

    Raises:
        ConfigError: the log cannot be opened.
    """

    def __init__(self, path: str, opened: Opened) -> None:
        self._numbers = count(1)
        self._recent: dict[int, DecisionRecord] = {}  # by consecutive numbers
        self._file: IO[bytes] | None = None
        self._batch = LineBatch(self._write_lines)
        if path:
            try:
                self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - until close()
                _end_last_line(self._file)
            except OSError as error:
                raise ConfigError(f"the decision log cannot be written: {error}") from error
        self.opened(opened)

    def opened(self, event: Opened) -> None:
        """Write that another policy decides from now on."""
        self._write(event)
        self._batch.flush()

    def next_number(self) -> int:
        """Return the number of a new decision, from 1."""
        return next(self._numbers)

    def decided(self, event: Decided) -> None:
        """Store and write a decision."""
        self._recent[event.number] = DecisionRecord(event)
        self._recent.pop(event.number - _RECENT, None)
        self._write(event)

    def finished(self, event: Finished) -> None:
        """Store and write the outcome of a decision."""
        if (record := self._recent.get(event.number)) is not None:  # None: no longer stored
            record.finished = event
        self._write(event)

    def reset(self, event: Reset) -> None:
        """Write that the policy's observations have been deleted."""
        self._write(event)
        self._batch.flush()

    def recent(self, limit: int, session: str | None) -> list[DecisionRecord]:
        """Return the latest decisions, the newest first.

        Args:
            limit: maximum number.
            session: of the decisions; None: any.
        """
        chosen: list[DecisionRecord] = []
        for record in reversed(self._recent.values()):
            features = record.decided.features
            if session is None or (features is not None and features.session == session):
                chosen.append(record)
                if len(chosen) == limit:
                    break
        return chosen

    def close(self) -> None:
        """Write what is left, and close the decision log."""
        self._batch.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event) -> None:
        if self._file is not None:
            self._batch.add(to_line(event))

    def _write_lines(self, lines: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._file.write(lines) != len(lines):
                raise OSError("the disk is full")
        except OSError as error:  # requests must go on
            logger.error("the decision log ends here: %s", error)
            self._file.close()
            self._file = None


def opened_by(
    config: RouterConfig, tables: Mapping[str, TableFile | None], model: str = ""
) -> Opened:
    """Return the first event of a run's decision log.

    Args:
        config: of the run.
        tables: of the models, by name.
        model: the one of several whose policy is another one; "": all of them.
    """
    found = digests(tables)
    several = len(found) > 1
    return Opened(
        version=VERSION,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=config.policy,
        corrections=tuple(sorted(config.corrections)),
        append_budget_tokens=config.append_budget_tokens,
        table="" if several else next(iter(found.values()), ""),
        tables=found if several else {},
        model=model if several else "",
    )


def digests(tables: Mapping[str, TableFile | None]) -> dict[str, str]:
    """Return the digest of each table, "" for none."""
    return {model: table.digest if table else "" for model, table in tables.items()}


def _end_last_line(file: IO[bytes]) -> None:
    """End a line that a killed process left incomplete."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
