"""Log output, one line for each record, as text or as JSON.

A record's ``extra={"fields": {...}}`` is written too: as ``name=value`` after the message in
text, as members of the object in JSON.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

from ..config.options import LogFormat


def log_to_stderr(level: str, form: LogFormat) -> None:
    """Write log records of ``level`` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.JSON:
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(_Text("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # No format has a record's thread and process: skips their look-up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        fields = getattr(record, "fields", None)
        if not fields:
            return line
        return f"{line} {' '.join(f'{name}={_format(value)}' for name, value in fields.items())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
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
