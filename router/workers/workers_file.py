"""A file that lists workers, read again when it changes.

Owns reading and judging it. A file that is wrong changes nothing, and is complained of once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from ppd.contract import Role
from ppd.errors import ConfigError

from ..config.options import url_problem

logger = logging.getLogger("ppd.router.workers")

_Stamp = tuple[int, int, int]


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    replica: tuple[str, ...] = ()


class WorkersFile:
    """A source of workers.

    Args:
        roles: of the workers that the router's policy uses.
        interval_s: between two looks.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """

    name = "workers_file"

    def __init__(self, path: str, roles: Collection[Role], interval_s: float) -> None:
        self._path = Path(path)
        self._roles = roles
        self._interval_s = interval_s
        self._seen: _Stamp | None = None  # of the contents that were judged last
        self._unreadable = ""  # why, as last told
        self._first = self.look()

    async def watch(self, tell: Callable[[Mapping[str, Role]], None]) -> None:
        if self._first is not None:
            tell(self._first)
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                listed = await asyncio.to_thread(self.look)  # the disk may be far away
            except ConfigError as error:
                logger.error("%s; the workers stay those it listed before", error)
                continue
            if listed is not None:
                count = Counter(listed.values())
                shape = ", ".join(f"{count[role]} {role}" for role in self._roles)
                logger.info("%s lists other workers now: %s", self._path, shape)
                tell(listed)

    def look(self) -> dict[str, Role] | None:
        """What it lists; None if it has not changed since the last look.

        Raises:
            ConfigError: it has changed, and is wrong; or cannot be read any more.
        """
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            data = self._path.read_bytes()
            if self._stamp() != stamp:
                return None  # it is being written: the next look shows what has become of it
        except OSError as error:
            self._seen, before = None, self._unreadable
            self._unreadable = str(error)
            if self._unreadable == before:
                return None
            raise ConfigError(f"workers_file: {error}") from error
        self._seen, self._unreadable = stamp, ""
        try:
            return parse(data, self._roles)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _stamp(self) -> _Stamp:
        told = self._path.stat()
        return told.st_mtime_ns, told.st_size, told.st_ino


def parse(data: bytes, roles: Collection[Role]) -> dict[str, Role]:
    """The listed workers' roles by URL.

    Raises:
        ConfigError: listing everything that is wrong.
    """
    try:
        listed = msgspec.toml.decode(data, type=_Listed)
    except ValueError as error:  # of TOML's syntax, and of msgspec's types
        raise ConfigError(str(error)) from error
    wrong: list[str] = []
    workers: dict[str, Role] = {}
    for role in Role:
        urls: tuple[str, ...] = getattr(listed, role)
        if urls and role not in roles:
            wrong.append(f"this router uses no {role} workers, only {', '.join(roles)}")
        for url in (url.rstrip("/") for url in urls):
            if problem := url_problem(role, url):
                wrong.append(problem.removeprefix("--"))
            elif url in workers:
                wrong.append(f"two workers on one URL: {url}")
            workers[url] = role
    if not workers:  # as editors and shells leave it for a moment
        wrong.append("it lists no workers")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return workers
