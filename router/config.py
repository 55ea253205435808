"""The router's options, checked as a whole before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ppd.decision import POLICIES
from ppd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Attributes:
    prefill, decode: base URLs of the workers, scheme and host only.
    startup_timeout_s: how long to wait for every worker's handshake.
    connect_timeout_s: per connection to a worker.
    idle_timeout_s: a leg that sends nothing for so long has failed.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: str = "full"
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 64 * 1024 * 1024
    session_capacity: int = 100_000
    session_ttl_s: float = 3600.0
    startup_timeout_s: float = 120.0
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 600.0
    probe_interval_s: float = 2.0

    def check(self) -> None:
        """Raises:
        ConfigError: listing everything that is wrong.
        """
        wrong: list[str] = []
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                wrong.append(f"at least one --{role} URL is needed")
            wrong += [problem for url in urls if (problem := _url_problem(role, url))]
        given = [*self.prefill, *self.decode]
        for url in sorted({url for url in given if given.count(url) > 1}):
            wrong.append(f"two workers on one URL: {url}")
        if self.policy not in POLICIES:
            wrong.append(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.port <= 65535:
            wrong.append(f"--port must be 0..65535, got {self.port}")
        for name in ("max_body_bytes", "session_capacity", "session_ttl_s", "startup_timeout_s"):
            value = getattr(self, name)
            if not value > 0:  # also for NaN
                wrong.append(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if wrong:
            raise ConfigError("; ".join(wrong))


def _url_problem(role: str, url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"--{role} {url!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return f"--{role} must be http://HOST:PORT, got {url!r}"
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        return f"--{role} must have no path, query or user, got {url!r}"
    return None
