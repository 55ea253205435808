"""Lines that are written together: one system call for those of some milliseconds.

The owner gives the function that writes. A batch is bounded in bytes and in time. What is in it is
lost only if the process is killed, so its owner flushes it at shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DELAY_S = 0.05  # from the first line of a batch to its write
MAX_BYTES = 64 * 1024


class LineBatch:
    """Collects lines and writes them together.

    Without a running event loop each line is written at once.

    Args:
        write: writes whole lines. It handles its own errors.
        due: called when the batch is due, and calls ``flush``; None: that is all there is to do.
    """

    def __init__(
        self, write: Callable[[bytes], None], due: Callable[[], None] | None = None
    ) -> None:
        self._write = write
        self._on_due = due or self.flush
        self._lines: list[bytes] = []
        self._bytes = 0
        self._scheduled: asyncio.AbstractEventLoop | None = None  # of the pending flush

    def add(self, line: bytes) -> None:
        """Add a line, which ends with a line break."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= MAX_BYTES:
            self.flush()
        elif self._scheduled is None or self._scheduled.is_closed():
            self._schedule()

    def flush(self) -> None:
        """Write all lines."""
        if self._lines:
            lines, self._lines, self._bytes = self._lines, [], 0
            self._write(b"".join(lines))

    def _schedule(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        self._scheduled = loop
        loop.call_later(DELAY_S, self._due)

    def _due(self) -> None:
        self._scheduled = None
        self._on_due()
