"""Listening sockets, their TLS, and the servers on them."""

from __future__ import annotations

import asyncio
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

# The first one; intermediate certificates may follow.
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound to an address but does not accept connections yet.

    Args:
        host: of the address.
        port: of the address; 0: any free one.
        shared: other processes may bind the address too.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio disables Nagle's algorithm on accepted connections.
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
    """Return the host part of a URL by which this machine reaches a listener on ``host``."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{here}]" if ":" in here else here


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """Return the base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def tls_of(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the server's TLS context; None if the configuration has no certificate.

    Raises:
        ConfigError: the files hold no certificate and its key.
    """
    if not config.tls_certificate:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.set_alpn_protocols(["http/1.1"])
    load(tls, config)
    return tls


def load(tls: ssl.SSLContext, config: RouterConfig) -> None:
    """Load the certificate and its key, for new connections.

    Raises:
        ConfigError: the files hold no certificate and its key.
    """
    try:
        tls.load_cert_chain(config.tls_certificate, config.tls_key)
    except OSError as error:  # including ssl.SSLError
        raise ConfigError(
            f"tls_certificate {config.tls_certificate}, tls_key {config.tls_key}: {error}"
        ) from error


def peer_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the TLS context for requests to peers; None if the configuration has no certificate.

    The processes on the port connect by address. So only the router's own certificate is trusted,
    whatever host name it has.

    Raises:
        ConfigError: the file holds no certificate.
    """
    if not config.tls_certificate:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust_certificate(tls, config)
    return tls


def trust_certificate(tls: ssl.SSLContext, config: RouterConfig) -> None:
    """Trust the configuration's certificate, for new connections to peers.

    Raises:
        ConfigError: the file holds no certificate.
    """
    try:
        found = _CERTIFICATE.search(Path(config.tls_certificate).read_text())
        tls.load_verify_locations(cadata=found[0] if found else "")
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
    """Serve on a bound socket while the context is open.

    Args:
        app: serves all other paths.
        listener: the bound socket.
        config: with limits and times.
        front: serves the token path; None: ``app`` does.
        tls: for https; None: http.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=config.shutdown_grace_s
    )
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=() if front is None else PATHS,
        handler=_no_handler if front is None else front.serve,
        fallback=runner.server,
        refuse=refuse if front is None else front.refuse,
        screen=_accept if front is None else front.screen,
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
            loop = asyncio.get_running_loop()
            ends_s = loop.time() + config.shutdown_grace_s
            await server.stop(config.shutdown_grace_s)
            # Of requests to the other paths; 0 would be no limit.
            await runner.server.shutdown(max(0.1, ends_s - loop.time()))
    finally:
        await runner.cleanup()


def _accept(path: str, headers: Mapping[str, str]) -> None:
    """Refuse no large body."""


async def _no_handler(request: Request) -> None:
    raise AssertionError("no path is served here")
