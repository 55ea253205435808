"""A Valkey or Redis server as a process: started, killed, stopped and continued.

For the tests of the shared store, and for the bench of its cost.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ppd.errors import PpdError

from .cluster import free_port

_PROGRAMS = ("valkey-server", "redis-server")
_START_S = 20.0
_READY = b"Ready to accept connections"


def program() -> str | None:
    """Return the path of an installed server; None if there is none."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


@dataclass(slots=True)
class StoreServer:
    """One server on a port of this host; its data are in memory only.

    Attributes:
        path: of the program.
        folder: for its files.
        port: that it listens on; the same after a restart.
        options: further options of its command line.
    """

    path: str
    folder: Path
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the server, and wait until it accepts connections.

        Raises:
            PpdError: it does not start.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *(self.path, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(self.folder)),
            *self.options,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        log = b""
        async with asyncio.timeout(_START_S):
            while _READY not in log:
                line = await process.stdout.readline()
                if not line:
                    raise PpdError(f"{self.path} does not start: {log.decode(errors='replace')}")
                log += line
        self._reading = asyncio.create_task(_discard(process.stdout))

    async def kill(self) -> None:
        """Kill the server; its data are lost."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    def freeze(self) -> None:
        """Stop the process: connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it has been started"
        self._process.send_signal(number)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StoreServer]:
        """Run the server while the context is open."""
        await self.start()
        try:
            yield self
        finally:
            await self.kill()


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass
