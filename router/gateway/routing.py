"""What the endpoint picker uses of the router."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.gateway import GatewayConfig
from ..intake.catalog import Catalog
from ..serving.handler import RequestHandler


@dataclass(frozen=True, slots=True)
class Times:
    """Limits on a gateway's pauses, in seconds.

    Attributes:
        request_s: between two parts of a request's body.
        answer_s: until the head of a response.
        idle_s: between two parts of a response.
    """

    request_s: float
    answer_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Routing:
    """The components that an exchange uses.

    Attributes:
        options: of the picker.
        handler: plans requests, and records their ends.
        catalog: the models.
        max_body_bytes: of a request.
        times: limits on pauses.
    """

    options: GatewayConfig
    handler: RequestHandler
    catalog: Catalog
    max_body_bytes: int
    times: Times
