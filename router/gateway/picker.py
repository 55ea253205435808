"""The gRPC service that a gateway asks where each request goes."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from ppd.errors import ConfigError

from ..config.options import RouterConfig
from . import envoy
from .exchange import Exchange
from .messages import ProtocolError, SilentError
from .routing import Routing

logger = logging.getLogger("ppd.router.gateway")

_MAX_MESSAGE = 4 * 1024 * 1024


class _GrpcStream:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> ProcessingRequest | None:
        message: ProcessingRequest = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: ProcessingResponse) -> None:
        await self._context.write(message)


@asynccontextmanager
async def picking(config: RouterConfig, routing: Routing) -> AsyncIterator[None]:
    """Serve Envoy's external processing protocol while the context is open.

    The service has the router's certificate, if there is one.

    Args:
        config: of the router.
        routing: what exchanges use of it.

    Raises:
        ConfigError: the address cannot be bound.
    """
    options = routing.options

    async def process(_: object, context: Any) -> None:
        try:
            await Exchange(_GrpcStream(context), routing).run()
        except ProtocolError as error:
            logger.error("a gateway's stream is refused: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SilentError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    method = grpc.stream_stream_rpc_method_handler(
        process, ProcessingRequest.parse, ProcessingResponse.__bytes__
    )
    server = grpc.aio.server(
        maximum_concurrent_rpcs=config.max_connections,
        options=[
            ("grpc.so_reuseport", int(config.processes > 1)),
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ],
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(envoy.SERVICE, {"Process": method}),)
    )
    host = options.host or config.host
    address = f"[{host}]:{options.port}" if ":" in host else f"{host}:{options.port}"
    port = _bind(server, address, config)
    await server.start()
    logger.info("gateways: %s:%d", host, port)
    try:
        yield
    finally:
        await server.stop(config.shutdown_grace_s)


class _Certificate:
    """The router's certificate and key, read again for each handshake.

    Args:
        certificate: PEM file.
        key: PEM file.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._used: tuple[bytes, bytes] | None = None

    def read(self) -> Any:
        """Return the files' content as gRPC takes it.

        Raises:
            OSError: they cannot be read, or do not belong together.
        """
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key)
        self._used = self._key.read_bytes(), self._certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([self._used])

    def renewed(self) -> Any:
        """Return the content if it is new and sound; None: the one before is used."""
        try:
            if (self._key.read_bytes(), self._certificate.read_bytes()) == self._used:
                return None
            return self.read()
        except OSError as error:  # of a file that is being written, too
            logger.warning("gateway: the certificate is not renewed: %s", error)
            return None


def _bind(server: Any, address: str, config: RouterConfig) -> int:
    """Bind the service, with the router's certificate if there is one; returns the port."""
    try:
        if not config.tls_certificate:
            return int(server.add_insecure_port(address))
        certificate = _Certificate(Path(config.tls_certificate), Path(config.tls_key))
        credentials = grpc.dynamic_ssl_server_credentials(certificate.read(), certificate.renewed)
        return int(server.add_secure_port(address, credentials))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"gateway: cannot listen on {address}: {error}") from error
