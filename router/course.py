"""What has been settled about one request while it is served."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.decision import Decision, Features
from ppd.sessions import Hit

from .requests import Inbound
from .workers import Worker


@dataclass(slots=True)
class Course:
    """One request on its way.

    Attributes:
        headers: of the client, as the workers get them.
        arrived_s, first_byte_s: by the router's clock.
        hit, features: the conversation it continues, and what the decision saw of it.
        decision: the route as it now is; a refused local turn becomes a remote one.
        prefill: the prefill worker of a remote turn.
        retried: it has been sent a second time after a worker was lost.
        outcome: how it ended; None while it is served.
    """

    inbound: Inbound
    headers: dict[str, str]
    arrived_s: float
    hit: Hit | None
    features: Features | None
    decision: Decision
    prefill: Worker | None = None
    retried: bool = False
    outcome: str | None = None
    first_byte_s: float | None = None

    @property
    def turn(self) -> int:
        if self.hit is None:
            return 1
        # The same input again is the same turn, generated anew.
        return self.hit.turn.number + (self.hit.bytes_after > 0)

    @property
    def ttft_s(self) -> float:
        assert self.first_byte_s is not None, "asked before a worker had spoken"
        return self.first_byte_s - self.arrived_s

    def answer_headers(self) -> dict[str, str]:
        return {
            "X-PPD-Route": self.decision.route,
            "X-PPD-Reason": self.decision.reason,
            "X-PPD-Turn": str(self.turn),
        }
