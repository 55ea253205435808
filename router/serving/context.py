"""The state of one request while it is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ppd.attempts import Attempts
from ppd.decision import Decision
from ppd.effects import Crashed, Effect, Event, Note, Prime
from ppd.outcome import Outcome
from ppd.placement import PlannedTurn, WorkerView

from ..intake.inbound import Inbound
from ..workers.sglang import Usage
from .legs import Answer, Leg

logger = logging.getLogger("ppd.router.turns")


class RequestContext:
    """One request: what was asked, what was planned, what became of it.

    Args:
        number: of the request, in the decision log.
        session: the number of its conversation.
        inbound: the client's request.
        tenant: its sender.
        headers: of the client, as the workers get them.
        clients_key: workers check the client's own API key.
        arrived_s: by ``clock``.
        planned: its route and first plan.
        attempts: at serving it.
        note: called with each effect, to hold it for or against a worker.
        clock: seconds, monotonic.

    Attributes:
        hit: the earlier turn that it continues; None if none is known.
        features: what its route was decided from; None without a hit.
        kv_tokens: KV that it was expected to need.
        turn: the number of the turn in its conversation, from 1.
        inbound: the request that workers are sent; the rest of it, once a stream is continued.
        decided_s: when it was decided, by ``clock``.
        answer: the latest answer of a worker.
        client_waits_s: time in which the client did not take what was there for it.
        usage: as the engine counted, once it has.
        outcome: how it ended, for its client; None while it is served.
        recorded: its end is in the decision log.
        legs: open ones.
    """

    __slots__ = (
        "_clock",
        "_effects",
        "_note",
        "_waiter",
        "answer",
        "arrived_s",
        "attempts",
        "client_waits_s",
        "clients_key",
        "decided_s",
        "features",
        "headers",
        "hit",
        "inbound",
        "kv_tokens",
        "legs",
        "number",
        "outcome",
        "planned",
        "recorded",
        "session",
        "streams",
        "tenant",
        "turn",
        "usage",
    )

    def __init__(
        self,
        *,
        number: int,
        session: int,
        inbound: Inbound,
        tenant: str,
        headers: dict[str, str],
        clients_key: bool,
        arrived_s: float,
        planned: PlannedTurn,
        attempts: Attempts,
        note: Callable[[Effect], None],
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.session = session
        self.inbound = inbound
        self.tenant = tenant
        self.headers = headers
        self.clients_key = clients_key
        self.arrived_s = arrived_s
        self.decided_s = clock()
        self.planned = planned
        self.hit = planned.hit
        self.features = planned.features
        self.kv_tokens = planned.kv_tokens
        self.turn = 1 if planned.hit is None else planned.hit.next_turn
        self.attempts = attempts
        self._note = note
        self._clock = clock
        self.answer: Answer | None = None
        self.streams = False
        self.client_waits_s = 0.0
        self.usage: Usage | None = None
        self.outcome: Outcome | None = None
        self.recorded = False
        self.legs: list[Leg] = []
        self._effects: list[Effect] = []  # hardly ever more than one
        self._waiter: asyncio.Future[None] | None = None

    # -- events and effects ----------------------------------------------------------------

    def take(self, event: Event) -> Effect:
        """Hand an event to the attempts, and note the success or failure in its effect."""
        effect = self.attempts.on(event, self._clock())
        self._note(effect)
        return effect

    def deliver(self, event: Event) -> None:
        """Take an event from a callback; its effect is performed by the request's coroutine.

        A bug met here ends the request. It must not reach the callback, which is a worker's
        connection.
        """
        try:
            effect = self.attempts.on(event, self._clock())
            self._note(effect)
        except Exception:
            logger.exception("%s could not be handled", event)
            self.close_legs()  # no block follows the end
            effect = self.attempts.on(Crashed(), self._clock())
        if type(effect) is Note:
            return
        if type(effect) is not Prime:
            self._effects.clear()
        self._effects.append(effect)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ready_effect(self) -> Effect | None:
        """The next effect, if an event has given one already."""
        return self._effects.pop(0) if self._effects else None

    async def next_effect(self) -> Effect:
        """Wait until an event has given an effect."""
        while not self._effects:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._effects.pop(0)

    def close_legs(self) -> None:
        """Close all legs, which aborts what has not ended."""
        try:
            while self.legs:
                self.legs.pop().close()
        finally:
            if self.legs:  # whatever one of them raises, all are closed
                self.close_legs()

    # -- what is recorded ------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        """The route as it was taken: a refused local turn has become a remote one."""
        return self.attempts.decision

    @property
    def prefill(self) -> WorkerView | None:
        """The prefill worker of the attempt that was answered; None if it had none."""
        return self.attempts.prefill

    @property
    def at_home(self) -> bool:
        """Whether the last attempt decodes where the conversation's last turn did."""
        plan = self.attempts.plan
        return (
            plan is not None
            and self.hit is not None
            and (plan.decode.identity == self.hit.turn.home)
        )

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its stream's first event.

        None before that event, and for a whole answer: its first token came at an unknown time.
        """
        answered_at_s = self.attempts.answered_at_s
        if answered_at_s is None or not self.streams:
            return None
        return answered_at_s - self.arrived_s

    def answer_headers(self) -> dict[str, str]:
        """Headers of the answer that name its route."""
        decision = self.decision
        return {
            "X-PPD-Route": decision.route,
            "X-PPD-Reason": decision.reason,
            "X-PPD-Turn": str(self.turn),
        }

    def span_attributes(self) -> dict[str, Any]:
        """What its OpenTelemetry span holds; names of the GenAI conventions where there are."""
        decision = self.decision
        attributes: dict[str, Any] = {
            "ppd.route": decision.route.value,
            "ppd.reason": decision.reason.value,
            "ppd.turn": self.turn,
            "ppd.tenant": self.tenant,
            "ppd.retried": self.attempts.retried,
            "gen_ai.request.model": str(self.inbound.fields.get("model", "default")),
        }
        if self.hit is not None:
            attributes["ppd.session"] = self.hit.turn.session_name
        if self.usage is not None:
            attributes["gen_ai.usage.input_tokens"] = self.usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = self.usage.completion_tokens
            attributes["ppd.cached_tokens"] = self.usage.cached_tokens
        return attributes
