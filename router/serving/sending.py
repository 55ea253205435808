"""Opens the legs of a plan; what they respond becomes events of the request's attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ppd.attempts import blames_worker
from ppd.contract import LocalTerms
from ppd.effects import Answered, Failed, Failure, Prefilled, PrefillFailed, Prime
from ppd.placement import Plan

from ..intake.inbound import Inbound
from ..wire.client import Upstreams
from ..workers.health import WorkerHealth, worker_of
from ..workers.worker import Worker
from .bodies import body_of, for_rank, session_field, with_terms
from .context import RequestContext
from .legs import Answer, Leg

# Events without details of their own.
_STREAM, _BODY, _PREFILLED = Answered(streams=True), Answered(streams=False), Prefilled()


class Sender:
    """Sends requests to workers.

    Args:
        upstreams: connections to workers.
        health: of workers, for what a stream's worker does beside it.
        new_room: gives a random bootstrap room below 2**63.
    """

    def __init__(
        self, upstreams: Upstreams, health: WorkerHealth, new_room: Callable[[], int]
    ) -> None:
        self._upstreams = upstreams
        self._health = health
        self._new_room = new_room

    def send(self, context: RequestContext, plan: Plan) -> None:
        """Open a plan's legs.

        Both legs of a remote turn start at once. The decode worker's answer is not held back by
        the prefill worker's, whose content is dropped.
        """
        body = body_of(context.inbound, plan, context.session, self._new_room)
        responses = _Responses(context)
        if plan.prefill is not None:
            prefill = self._open(context, worker_of(plan.prefill), body, responses.on_prefill)
            prefill.set_sink(None)
        decode = worker_of(plan.decode)
        self._open(context, decode, for_rank(body, decode), responses.on_response)

    async def prime(self, context: RequestContext, primer: Inbound, prime: Prime) -> Failure | None:
        """Have a stream's worker prefill a passage beside the stream; None if it did.

        A worker that offers no local turns is not asked.

        Args:
            context: of the stream.
            prime: the effect to carry out.
            primer: a request for the KV alone.
        """
        worker = worker_of(prime.worker)
        if not worker.takes_appends:
            return None
        terms = LocalTerms(prime.min_cached_tokens)
        body = with_terms(primer, terms, session_field(primer, context.session, worker))
        response = _Response(self._upstreams.loop)
        leg = self._open(context, worker, for_rank(body, worker), response.on_response)
        try:
            answer = await response.future
        finally:
            leg.close()
            if leg in context.legs:
                context.legs.remove(leg)
        if isinstance(answer, Answer):
            self._health.credit(worker)
            return None
        if blames_worker(answer):
            self._health.blame(worker)
        return answer

    def _open(
        self,
        context: RequestContext,
        worker: Worker,
        body: bytes,
        on_response: Callable[[Answer | Failure], None],
    ) -> Leg:
        worker.breaker.sent()
        path = context.inbound.endpoint
        leg = Leg(
            self._upstreams, worker, path, body, context.headers, context.clients_key, on_response
        )
        context.legs.append(leg)
        return leg


# Classes, not functions inside the ones that use them: compiled, those are kept by what they close
# over, and each request would leave a cycle to the garbage collector.
class _Responses:
    """Turns the responses of a plan's legs into events."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def on_response(self, response: Answer | Failure) -> None:
        context = self._context
        if isinstance(response, Answer):
            context.answer = response
            context.deliver(_STREAM if response.streams else _BODY)
        else:
            context.deliver(Failed(response))

    def on_prefill(self, response: Answer | Failure) -> None:
        if isinstance(response, Failure):
            self._context.deliver(PrefillFailed(response))
        else:
            self._context.deliver(_PREFILLED)


class _Response:
    """The one response of a leg that is awaited by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Answer | Failure] = loop.create_future()

    def on_response(self, response: Answer | Failure) -> None:
        if not self.future.done():  # else it was cancelled, with what awaited it
            self.future.set_result(response)
