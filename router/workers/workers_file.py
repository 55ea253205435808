"""A source of workers: a file that lists them, read again when it changes.

Owns the reading and validation of the file. A file with an error changes nothing; the error is
logged once.
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
    """A source of workers that watches a file.

    Args:
        path: the TOML file.
        roles: roles that the router's policy uses.
        interval_s: seconds between two checks whether the file has changed.

    Raises:
        ConfigError: the file cannot be read, or has an error.
    """

    name = "workers_file"

    def __init__(self, path: str, roles: Collection[Role], interval_s: float) -> None:
        self._path = Path(path)
        self._roles = roles
        self._interval_s = interval_s
        self._last_stamp: _Stamp | None = None  # of the contents that were read last
        self._read_error = ""  # the last one
        self._initial = self.read_changes()

    async def watch(self, publish: Callable[[Mapping[str, Role]], None]) -> None:
        """Call ``publish`` with the listed roles by URL, at once and on every change."""
        if self._initial is not None:
            publish(self._initial)
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                listed = await asyncio.to_thread(self.read_changes)  # disks may be remote
            except ConfigError as error:
                logger.error("%s; the workers stay those it listed before", error)
                continue
            if listed is not None:
                count = Counter(listed.values())
                shape = ", ".join(f"{count[role]} {role}" for role in self._roles)
                logger.info("%s lists other workers now: %s", self._path, shape)
                publish(listed)

    def read_changes(self) -> dict[str, Role] | None:
        """Read the file; None if it has not changed since the last call.

        Raises:
            ConfigError: the file has changed and has an error, or cannot be read any more.
        """
        try:
            stamp = self._stamp()
            if stamp == self._last_stamp:
                return None
            data = self._path.read_bytes()
            if self._stamp() != stamp:
                return None  # it is being written, and is read by the next call
        except OSError as error:
            self._last_stamp, previous = None, self._read_error
            self._read_error = str(error)
            if self._read_error == previous:
                return None
            raise ConfigError(f"workers_file: {error}") from error
        self._last_stamp, self._read_error = stamp, ""
        try:
            return parse(data, self._roles)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _stamp(self) -> _Stamp:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino


def parse(data: bytes, roles: Collection[Role]) -> dict[str, Role]:
    """Parse the file's contents into roles by URL.

    Args:
        data: TOML, with a list of URLs for each role.
        roles: roles that the router's policy uses.

    Raises:
        ConfigError: the contents have errors; the message lists all of them.
    """
    try:
        listed = msgspec.toml.decode(data, type=_Listed)
    except ValueError as error:  # of TOML's syntax, and of msgspec's types
        raise ConfigError(str(error)) from error
    problems: list[str] = []
    workers: dict[str, Role] = {}
    for role in Role:
        urls: tuple[str, ...] = getattr(listed, role)
        if urls and role not in roles:
            problems.append(f"this router uses no {role} workers, only {', '.join(roles)}")
        for url in (url.rstrip("/") for url in urls):
            if problem := url_problem(role, url):
                problems.append(problem.removeprefix("--"))
            elif url in workers:
                problems.append(f"two workers on one URL: {url}")
            workers[url] = role
    if not workers:  # editors and shells truncate a file before they write it
        problems.append("it lists no workers")
    if problems:
        raise ConfigError("; ".join(problems))
    return workers
