"""Log output, one line for each record, as text or as JSON.

A record's ``extra={"fields": {...}}`` is written too: as ``name=value`` after the message in
text, as members of the object in JSON. Lines below a warning are written in batches.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

import orjson

from ..config.options import LogFormat
from .batch import LineBatch


def log_to_stderr(level: str, form: LogFormat) -> None:
    """Write log records of ``level`` and above to stderr."""
    handler = BatchHandler(sys.stderr)
    handler.setFormatter(formatter_of(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # No format has a record's thread and process: skips their look-up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def formatter_of(form: LogFormat) -> logging.Formatter:
    """Return what makes the lines of a format."""
    if form is LogFormat.JSON:
        return _Json()
    return _Text("%(asctime)s %(levelname)s %(name)s %(message)s")


def log_fields(logger: logging.Logger, message: str, fields: dict[str, object]) -> None:
    """Log a record with fields at level INFO, which the caller has checked.

    No format has a record's file and line, so the stack is not searched for them.
    """
    record = logger.makeRecord(
        logger.name, logging.INFO, "", 0, message, (), None, extra={"fields": fields}
    )
    logger.handle(record)


class BatchHandler(logging.Handler):
    """Writes records to a stream in batches; a warning or an error at once, with all before it.

    Args:
        stream: with a file descriptor.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._batch = LineBatch(self._write, self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record to the batch."""
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001 - as the handlers of the standard library
            self.handleError(record)
            return
        self._batch.add(line)
        if record.levelno >= logging.WARNING:
            self._batch.flush()

    def flush(self) -> None:
        """Write all records."""
        self.acquire()
        try:
            self._batch.flush()
        finally:
            self.release()

    def _write(self, lines: bytes) -> None:
        try:
            self._stream.flush()
            while lines:
                lines = lines[os.write(self._stream.fileno(), lines) :]
        except OSError:
            pass  # stderr is gone, and with it the place to report that


class _Text(logging.Formatter):
    _second, _stamp = -1, ""  # the last second, and its text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._stamp},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        fields = getattr(record, "fields", None)
        if not fields:
            return line
        return f"{line} {' '.join(f'{name}={_format(value)}' for name, value in fields.items())}"


class _Json(logging.Formatter):
    _second, _stamp = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._stamp = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        entry = {
            "time": f"{self._stamp}.{int(record.msecs):03d}+00:00",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return f'"{text}"' if " " in text else text
