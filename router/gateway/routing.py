"""What the endpoint picker uses of the router."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.placement import Placement

from ..config.gateway import GatewayConfig
from ..serving.handler import RequestHandler
from ..serving.recorder import RequestRecorder
from ..workers.health import WorkerHealth
from ..workers.registry import WorkerRegistry


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
        recorder: records answers.
        health: takes successes and failures of workers.
        placement: names the workers of a plan.
        registry: the workers.
        max_body_bytes: of a request.
        times: limits on pauses.
    """

    options: GatewayConfig
    handler: RequestHandler
    recorder: RequestRecorder
    health: WorkerHealth
    placement: Placement
    registry: WorkerRegistry
    max_body_bytes: int
    times: Times
