"""One connection to the shared Valkey or Redis server, and what its failures mean."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from ppd.errors import ConfigError

from ..config.shared import SharedConfig
from ..wire.errors import describe
from .problems import StoreError, StoreProblem

_DEFAULT_PORT = 6379


class StoreConnection:
    """A connection that is opened by its first command, and again after a failure.

    It is redis-py's connection without redis-py's client, whose pool and instruments take more
    time of the event loop than all else of a command.

    Args:
        config: the options.
    """

    def __init__(self, config: SharedConfig) -> None:
        self._timeout_s = config.timeout_ms / 1e3
        self._connection = _connection(config)
        self._lock = asyncio.Lock()

    async def run(self, *command: Any, wait_s: float = 0.0) -> Any:
        """Send a command, and return its answer; commands are sent one after the other.

        Args:
            command: its name and arguments.
            wait_s: time that the server may wait before it answers.

        Raises:
            StoreError: the server does not answer in time, or with an error.
        """
        connection = self._connection
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s + wait_s):
                    await connection.send_command(*command, check_health=False)
                    return await connection.read_response()
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                raise StoreError(_problem_of(error), describe(error)) from error

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect(nowait=True)


def _connection(config: SharedConfig) -> AbstractConnection:
    """Return a connection that is not open yet."""
    parts = urlsplit(config.url)
    options: dict[str, Any] = {
        "credential_provider": _Credentials(config) if config.has_secret else None,
        "socket_timeout": None,  # a command has one limit for all of its steps
        "retry": Retry(NoBackoff(), 0),  # the tasks that call have pauses of their own
        "protocol": 2,
    }
    if parts.scheme == "unix":
        return UnixDomainSocketConnection(path=parts.path, **options)
    options |= {
        "host": parts.hostname or "",
        "port": parts.port or _DEFAULT_PORT,
        "db": int(parts.path.removeprefix("/") or 0),
    }
    if parts.scheme == "rediss":
        return SSLConnection(ssl_ca_certs=config.ca_file or None, **options)
    return Connection(**options)


class _Credentials(CredentialProvider):
    """The user and the password, read for each connection: a file may have a new one."""

    def __init__(self, config: SharedConfig) -> None:
        self._config = config

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._config.secret or ""
        except ConfigError as error:
            raise exceptions.AuthenticationError(str(error)) from error
        return (self._config.username, password) if self._config.username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _problem_of(error: Exception) -> StoreProblem:
    match error:
        case (
            exceptions.AuthenticationError()
            | exceptions.AuthorizationError()
            | exceptions.AuthenticationWrongNumberOfArgsError()
            | exceptions.NoPermissionError()
        ):
            return StoreProblem.UNAUTHENTICATED
        case exceptions.OutOfMemoryError():
            return StoreProblem.FULL
        case exceptions.ReadOnlyError():
            return StoreProblem.READ_ONLY
        case exceptions.TimeoutError() | TimeoutError():
            return StoreProblem.SLOW
        case exceptions.ConnectionError() | OSError():
            return StoreProblem.UNREACHABLE
    return StoreProblem.REFUSED
