"""Options of the store that routers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from string import hexdigits
from urllib.parse import urlsplit

import msgspec

from ppd.errors import ConfigError

from .ranges import NonNegative, Positive, PositiveInt, range_problems

PASSWORD_VARIABLE = "PPD_SHARED_PASSWORD"
KEY_VARIABLE = "PPD_SHARED_RESPONSES_KEY"
_KEY_DIGITS = 64
_SCHEMES = ("redis", "rediss", "unix")
_MAX_PREFIX = 64


class SharedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[shared]`` of the router's file: a Valkey or Redis server that routers share.

    Attributes:
        url: ``redis://HOST:PORT/DB``, ``rediss://`` for TLS, or ``unix:///PATH``.
        username: of the server's ACL; "": the default user.
        password: of the user; "": of ``password_file``, or $PPD_SHARED_PASSWORD, or none.
        password_file: path of a file with the password. It is read for every connection.
        ca_file: PEM file of the authority that signed the server's certificate; "": the system's.
        prefix: of all keys. Routers with the same prefix share; their workers have the same URLs.
        ttl_s: lifetime of a record in the store; None: ``session_ttl_s``.
        timeout_ms: limit on a connection and on a command.
        queue_records: maximum number of records that wait to be written. Beyond it the oldest are
            dropped.
        max_bytes: maximum size of the records in the store. Beyond it the oldest are removed.
        responses: whether stored responses are shared, so that ``previous_response_id`` works at
            every router. They are encrypted.
        responses_key: of the encryption, 64 hexadecimal digits; "": of ``responses_key_file``, or
            $PPD_SHARED_RESPONSES_KEY.
        responses_key_file: path of a file with the key.
        catch_up_s: at a start, maximum time to read the store before requests are served.
    """

    url: str
    username: str = ""
    password: str = ""
    password_file: str = ""
    ca_file: str = ""
    prefix: str = "ppd"
    ttl_s: Positive | None = None
    timeout_ms: Positive = 500.0
    queue_records: PositiveInt = 65_536
    max_bytes: PositiveInt = 1024 * 1024 * 1024
    responses: bool = False
    responses_key: str = ""
    responses_key_file: str = ""
    catch_up_s: NonNegative = 10.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that is wrong."""
        yield from self._url_problems()
        if not self.prefix.isascii() or not self.prefix.isprintable() or " " in self.prefix:
            yield f"shared.prefix must be printable ASCII without spaces, got {self.prefix!r}"
        if not 0 < len(self.prefix) <= _MAX_PREFIX:
            yield f"shared.prefix must have 1..{_MAX_PREFIX} characters, got {len(self.prefix)}"
        if self.password and self.password_file:
            yield "shared.password and shared.password_file exclude each other"
        if self.responses_key and self.responses_key_file:
            yield "shared.responses_key and shared.responses_key_file exclude each other"
        if not self.responses and (self.responses_key or self.responses_key_file):
            yield "shared.responses_key is of shared.responses, which is false"
        yield from range_problems(self, "shared.")

    def _url_problems(self) -> Iterator[str]:
        try:
            parts = urlsplit(self.url)
            _port = parts.port
        except ValueError as error:
            yield f"shared.url: {error}"
            return
        if parts.username or parts.password:  # so that the URL can be logged
            yield "shared.url must have no user: use username, and password or password_file"
        elif parts.scheme not in _SCHEMES:
            yield f"shared.url must begin with redis://, rediss:// or unix://, got {self.url!r}"
        elif parts.query or parts.fragment:
            yield f"shared.url must have no query, got {self.url!r}"
        elif parts.scheme == "unix" and not parts.path.strip("/"):
            yield f"shared.url must name a socket, as unix:///run/valkey.sock, got {self.url!r}"
        elif parts.scheme != "unix" and not parts.hostname:
            yield f"shared.url must name a host, got {self.url!r}"
        elif parts.scheme != "unix" and not _is_database(parts.path):
            yield f"shared.url must end with the number of a database or nothing, got {self.url!r}"
        if self.ca_file and parts.scheme != "rediss":
            yield "shared.ca_file is for a rediss:// URL"

    @property
    def has_secret(self) -> bool:
        """Whether the server requires a user or a password, as far as configured."""
        return bool(self.username or self.password_file or self.secret)

    @property
    def secret(self) -> str | None:
        """The password; None without one.

        Raises:
            ConfigError: its file cannot be read.
        """
        if self.password_file:
            return _content("shared.password_file", self.password_file) or None
        return self.password or os.environ.get(PASSWORD_VARIABLE) or None

    def encryption_key(self) -> bytes:
        """Return the key of stored responses.

        Raises:
            ConfigError: there is none, it cannot be read, or it is no key.
        """
        given = self.responses_key or os.environ.get(KEY_VARIABLE, "")
        if self.responses_key_file:
            given = _content("shared.responses_key_file", self.responses_key_file)
        if not given:
            raise ConfigError(
                f"shared.responses needs responses_key, responses_key_file or ${KEY_VARIABLE}"
            )
        if len(given) != _KEY_DIGITS or not all(digit in hexdigits for digit in given):
            raise ConfigError(f"shared.responses_key must be {_KEY_DIGITS} hexadecimal digits")
        return bytes.fromhex(given)


def _content(option: str, path: str) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {error}") from error


def _is_database(path: str) -> bool:
    number = path.removeprefix("/")
    return not number or (number.isascii() and number.isdigit())
