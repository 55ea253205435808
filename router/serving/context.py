"""What has been settled about one request while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ppd.decision import Decision, Features
from ppd.planning import Judgement
from ppd.sessions import Hit

from ..intake.inbound import Inbound
from ..workers.worker import Worker
from .sse import Usage


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(slots=True)
class RequestContext:
    """One request on its way.

    Attributes:
        number: of the request, in the decision log.
        session: the number of its conversation.
        kv_tokens: it is expected to need on a decode worker.
        headers: of the client, as the workers get them.
        clients_key: whether workers are to judge the client's own.
        arrived_s, first_byte_s: by the router's clock.
        judged: what the decision saw, and what it was.
        decision: the route as it now is; a refused local turn becomes a remote one.
        prefill: the prefill worker of a remote turn.
        retried: it has been sent a second time after a worker failed with it.
        failed: the workers that did.
        outcome: how it ended; None while it is served.
        client_waits_s: time in which the client did not take what was there for it.
        usage: as the engine counted, once it has.
        recorded: its end stands in the decision log.
        opened: what must be closed when it is over.
    """

    number: int
    session: int
    inbound: Inbound
    tenant: str
    kv_tokens: int
    headers: dict[str, str]
    clients_key: bool
    arrived_s: float
    judged: Judgement
    decision: Decision
    prefill: Worker | None = None
    retried: bool = False
    failed: list[Worker] = field(default_factory=list)
    outcome: str | None = None
    first_byte_s: float | None = None
    client_waits_s: float = 0.0
    usage: Usage | None = None
    recorded: bool = False
    opened: list[Closable] = field(default_factory=list)

    @property
    def hit(self) -> Hit | None:
        return self.judged.hit

    @property
    def features(self) -> Features | None:
        return self.judged.features

    @property
    def turn(self) -> int:
        return 1 if self.hit is None else self.hit.next_turn

    @property
    def ttft_s(self) -> float:
        assert self.first_byte_s is not None, "asked before a worker had spoken"
        return self.first_byte_s - self.arrived_s

    def close(self) -> None:
        """Give up, or give back, whatever is still open."""
        try:
            while self.opened:
                self.opened.pop().close()
        finally:
            if self.opened:  # whatever one of them raises, all are closed
                self.close()

    def answer_headers(self) -> dict[str, str]:
        return {
            "X-PPD-Route": self.decision.route,
            "X-PPD-Reason": self.decision.reason,
            "X-PPD-Turn": str(self.turn),
        }
