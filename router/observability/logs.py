"""The log: a line a record, as text or as JSON. What a record has as ``extra={"fields": ...}``
follows its message: ``name=value`` in text, members in JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

from ..config.options import LogFormat


def log_to_stderr(level: str, form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.JSON:
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(_Text("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # No record is asked which thread and process it is from.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        told = super().formatMessage(record)
        fields = getattr(record, "fields", None)
        if not fields:
            return told
        return f"{told} {' '.join(f'{name}={_shown(value)}' for name, value in fields.items())}"


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


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return f'"{text}"' if " " in text else text
