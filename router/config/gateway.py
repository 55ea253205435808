"""Options of the endpoint picker for gateways."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .ranges import Port, RemotePort, range_problems


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[gateway]`` of the router's file.

    Attributes:
        port: of the gRPC service that gateways call; 0 is any free port, of one process.
            Several processes share a port that is given.
        host: address that it listens on; "": the router's ``host``.
        decode_port: port of the sidecar on the decode workers' hosts, to which the gateway sends
            requests; None: the decode worker's own port.
        prefill_header: name of the header that gives the sidecar the prefill worker.
    """

    port: Port
    host: str = ""
    decode_port: RemotePort | None = None
    prefill_header: str = "x-prefiller-host-port"

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that is wrong."""
        if not self.prefill_header.isascii() or self.prefill_header != self.prefill_header.lower():
            yield f"gateway.prefill_header must be lower-case ASCII, got {self.prefill_header!r}"
        if not self.prefill_header.replace("-", "").isalnum():
            yield f"gateway.prefill_header is no name of a header: {self.prefill_header!r}"
        yield from range_problems(self, "gateway.")
