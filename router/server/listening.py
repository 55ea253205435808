"""Addresses that are listened on, and what is served there."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from ppd.errors import ConfigError

from ..admin.app import refuse
from ..apis.front import PATHS, Front
from ..config.options import RouterConfig
from ..wire.reading import Limits
from ..wire.request import Request
from ..wire.server import WireServer

# The first one; those that vouch for it may follow.
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Takes the address; nobody can connect before it is served.

    Args:
        shared: with other processes.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, or asyncio does not switch Nagle's algorithm off on what is accepted.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def local(host: str) -> str:
    """Where to reach, from this machine, what listens on ``host``."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{here}]" if ":" in here else here


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def tls_of(config: RouterConfig) -> ssl.SSLContext | None:
    """Raises:
    ConfigError: the files hold no certificate and its key.
    """
    if not config.tls_certificate:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.set_alpn_protocols(["http/1.1"])
    load(tls, config)
    return tls


def load(tls: ssl.SSLContext, config: RouterConfig) -> None:
    """For connections to come.

    Raises:
        ConfigError: the files hold no certificate and its key.
    """
    try:
        tls.load_cert_chain(config.tls_certificate, config.tls_key)
    except OSError as error:  # of files, and ssl.SSLError of what they hold
        raise ConfigError(
            f"tls_certificate {config.tls_certificate}, tls_key {config.tls_key}: {error}"
        ) from error


def trusting(config: RouterConfig) -> ssl.SSLContext | None:
    """For processes on the port, which ask each other by address: their certificate is trusted,
    whatever name it is for, and nothing else.

    Raises:
        ConfigError: the file holds no certificate.
    """
    if not config.tls_certificate:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust(tls, config)
    return tls


def trust(tls: ssl.SSLContext, config: RouterConfig) -> None:
    """As ``trusting``, from now on."""
    try:
        held = _CERTIFICATE.search(Path(config.tls_certificate).read_text())
        tls.load_verify_locations(cadata=held[0] if held else "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_certificate {config.tls_certificate}: {error}") from error


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    config: RouterConfig,
    front: Front | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """
    Args:
        front: serves the token path; None: ``app`` answers there too.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=config.shutdown_grace_s
    )
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=() if front is None else PATHS,
        handler=nobody if front is None else front.serve,
        fallback=runner.server,
        refuse=refuse if front is None else front.refuse,
        screen=passed if front is None else front.screen,
        limits=Limits(
            head_bytes=config.max_head_bytes,
            body_bytes=config.max_body_bytes,
            request_s=config.client_request_timeout_s,
            idle_s=config.client_idle_timeout_s,
            stall_s=config.client_stall_timeout_s,
            linger_s=config.client_linger_timeout_s,
            connections=config.max_connections,
        ),
    )
    try:
        await server.start(listener, tls)
        try:
            yield
        finally:
            await server.stop(config.shutdown_grace_s)
    finally:
        await runner.cleanup()


def passed(path: str, headers: Mapping[str, str]) -> None:
    """Nobody is kept from anything."""


async def nobody(request: Request) -> None:
    raise AssertionError("no path is served here")
