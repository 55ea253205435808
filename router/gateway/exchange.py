"""One HTTP exchange of a gateway: the request is given its workers, the answer is recorded.

The gateway sends the request itself, once. So a turn that fails is not sent to other workers, and
a local turn has no precondition: a decode worker whose KV is gone prefills the whole prompt, within
its own bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Protocol

import orjson
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from ppd.contract import LocalTerms, Role
from ppd.decision import Decision, Reason, Route
from ppd.effects import (
    Abandon,
    Answered,
    Cause,
    ClientGone,
    Failed,
    Finish,
    Prefilled,
    Send,
    StreamBroke,
    StreamEnded,
    StreamFailed,
)
from ppd.errors import EngineError, PpdError, RequestError, WorkerError
from ppd.outcome import Outcome
from ppd.placement import Plan, PlannedTurn, WorkerView

from ..answers import answer_to
from ..intake.inbound import Endpoint
from ..serving.bodies import session_field, with_terms
from ..serving.context import RequestContext
from ..serving.legs import error_in_body, error_in_events, failure_of
from ..serving.sse import EventCutter, Tail
from ..workers.health import worker_of
from ..workers.sglang import usage_of_generate, usage_of_openai
from ..workers.worker import Worker
from . import envoy
from .routing import Routing

logger = logging.getLogger("ppd.router.gateway")

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_EVENT_STREAM = "text/event-stream"
_MODELS = "/v1/models"
# Headers that engines and sidecars obey, keys, and what would make an answer unreadable.
_OBEYED = (
    *("x-override-", "x-data-parallel-", "x-smg-", "x-prefiller-", "x-bootstrap-"),
    *("x-api-key", "accept-encoding"),
)
_RESPONSE = ("response_body", "response_trailers")  # after its head


class Stream(Protocol):
    """The gateway's stream of messages about one exchange."""

    async def read(self) -> ProcessingRequest | None:
        """The next message; None at the end."""
        ...

    async def write(self, message: ProcessingResponse) -> None:
        """Answer."""
        ...


class ProtocolError(PpdError):
    """The gateway's messages are not those of the protocol, or of a mode that is served."""


class _GoneError(PpdError):
    """The gateway has given the exchange up."""


class Exchange:
    """One exchange, from its request to the end of its response.

    Args:
        stream: the gateway's messages about it.
        routing: the router's components.
    """

    def __init__(self, stream: Stream, routing: Routing) -> None:
        self._stream = stream
        self._options = routing.options
        self._handler = routing.handler
        self._recorder = routing.recorder
        self._health = routing.health
        self._placement = routing.placement
        self._registry = routing.registry
        self._max_body_bytes = routing.max_body_bytes
        self._trailers = False  # of the request

    async def run(self) -> None:
        """Serve the exchange.

        Raises:
            ProtocolError: naming what is wrong.
        """
        first = await self._stream.read()
        if first is None:
            return
        head = first.request_headers
        if head is None:
            raise ProtocolError(f"request_headers come first, not {envoy.kind_of(first)}")
        if (problem := envoy.mode_problem(first)) is not None:
            raise ProtocolError(problem)
        headers = envoy.headers_of(head)
        method, path = headers.get(":method", ""), headers.get(":path", "").partition("?")[0]
        subset = envoy.subset_of(first)
        try:
            if method == "POST" and path in _ENDPOINTS:
                self._handler.keys.tenant(headers)  # before its body is read
                body = b"" if head.end_of_stream else await self._body()
                await self._generation(_ENDPOINTS[path], headers, body, subset)
            elif method == "GET" and path.startswith(_MODELS) and head.end_of_stream:
                self._handler.charge(headers)
                await self._models(headers, subset)
            else:
                served = ", ".join((*_ENDPOINTS, f"GET {_MODELS}"))
                message = f"{method} {path} is not served behind a gateway; there are {served}"
                raise RequestError(message, status=404)
        except _GoneError:
            return
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            answer = answer_to(error, f"{method} {path}")
            await self._stream.write(envoy.immediate(answer.status, answer.headers, answer.body))

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while (message := await self._stream.read()) is not None:
            part = message.request_body
            if message.request_trailers is not None:
                self._trailers = True
                return b"".join(parts)
            if part is None:
                raise ProtocolError(f"a request's body ends with {envoy.kind_of(message)}")
            parts.append(part.body)
            size += len(part.body)
            if size > self._max_body_bytes:
                text = f"the body is larger than {self._max_body_bytes} bytes"
                raise RequestError(text, status=413)
            if part.end_of_stream:
                return b"".join(parts)
        raise _GoneError

    async def _models(self, headers: dict[str, str], subset: Collection[str] | None) -> None:
        """Send a request for the list of models to the least busy worker that decodes."""
        ready = [*self._registry.ready(Role.DECODE), *self._registry.ready(Role.REPLICA)]
        fit = [worker for worker in ready if self._allowed(worker, subset)]
        if not fit:
            raise WorkerError("no worker that the gateway allows may be given work")
        worker = min(fit, key=lambda one: one.in_flight)
        with _in_flight(worker):
            await self._send(worker, None, headers, self._handler.keys.forwarded(headers), None)
            async with aclosing(self._response()) as response:
                await anext(response)
                await self._stream.write(envoy.response_head({}))
                await self._unrecorded(response)

    # -- a turn ------------------------------------------------------------------------------

    async def _generation(
        self,
        endpoint: Endpoint,
        headers: dict[str, str],
        body: bytes,
        subset: Collection[str] | None,
    ) -> None:
        context, trace = await self._handler.begin(endpoint, headers, body)
        try:
            plan = self._plan(context, subset)
            try:
                with _in_flight(worker_of(plan.decode)):
                    await self._turn(context, plan, headers)
            finally:
                if context.outcome is None:
                    self._end(context, ClientGone())
        finally:
            self._handler.end(context, trace)

    def _plan(self, context: RequestContext, subset: Collection[str] | None) -> Plan:
        """Begin the one attempt.

        Raises:
            PpdError: no worker can take the turn.
        """
        try:
            if subset is not None:
                self._narrow(context.planned, subset)
        except WorkerError:
            self._recorder.finished(context, Outcome.WORKER_ERROR)
            raise
        effect = context.attempts.start()
        if type(effect) is Send:
            return effect.plan
        assert type(effect) is Finish, "nothing has been sent"
        assert effect.error is not None, "it ends with an error"
        self._recorder.finished(context, effect.outcome)
        raise effect.error

    async def _turn(self, context: RequestContext, plan: Plan, clients: dict[str, str]) -> None:
        inbound, worker = context.inbound, worker_of(plan.decode)
        name = session_field(inbound, context.session, *plan.workers)
        if plan.route is Route.LOCAL:
            body = with_terms(inbound, LocalTerms(), name)
        else:
            body = inbound.with_fields(name)
        async with aclosing(self._response()) as response:
            with ExitStack() as prefilling:
                prefill = None if plan.prefill is None else worker_of(plan.prefill)
                if prefill is not None:
                    prefilling.enter_context(_in_flight(prefill))
                await self._send(worker, prefill, clients, context.headers, body)
                message = await anext(response)
            await self._stream.write(envoy.response_head(context.answer_headers()))
            assert message.response_headers is not None, "a response begins with its head"
            head = envoy.headers_of(message.response_headers)
            served = envoy.served_by(message)
            if served is not None and served != self._endpoint(worker):
                logger.warning("%s has answered instead of %s", served, worker.url)
                await self._unrecorded(response)
                return
            status = int(head.get(":status", "200"))
            kind = head.get("content-type", "").partition(";")[0].strip().lower()
            if status == 200 and kind == _EVENT_STREAM:
                await self._streamed(context, worker, response)
            else:
                await self._whole(context, worker, status, response)

    async def _streamed(
        self, context: RequestContext, worker: Worker, response: AsyncIterator[ProcessingRequest]
    ) -> None:
        inbound, cutter, begun = context.inbound, EventCutter(), False
        tail = Tail(
            hide_usage=not inbound.asks_usage,
            native=inbound.endpoint is Endpoint.GENERATE,
            batch=inbound.prompts > 1,
        )
        times, last_s = self._recorder.itl(context), 0.0
        try:
            async for message in response:
                passed = block = cutter.feed(_data(message))
                now_s = time.perf_counter()
                if block and not begun:
                    if (error := error_in_events(block, 200)) is not None:
                        await self._failed(context, error)
                        await self._pass_on(block, message)
                        await self._unrecorded(response)
                        return
                    begun = context.streams = True
                    worker.streams += 1
                    self._prefilled(context)
                    context.take(Answered(streams=True))
                    self._recorder.answered(context)
                elif block:
                    times.observe(now_s - last_s)
                if block:
                    last_s, passed = now_s, tail.pass_on(block)
                    if tail.done and not tail.failed:
                        self._recorder.record_answer(context, worker, tail.usage)
                await self._pass_on(passed, message)
        finally:
            worker.streams -= begun
        if not begun:
            text = f"{worker.role} worker ended its stream before the first event"
            await self._failed(context, EngineError(text, status=502))
        elif tail.done:
            self._end(context, StreamEnded(well=not tail.failed))
        else:
            tail.breaks_off()
            self._end(context, StreamFailed() if tail.failed else StreamBroke(resumable=False))

    async def _whole(
        self,
        context: RequestContext,
        worker: Worker,
        status: int,
        response: AsyncIterator[ProcessingRequest],
    ) -> None:
        parts: list[bytes] = []
        last: ProcessingRequest | None = None
        async for message in response:  # the last part waits until the answer is recorded
            if last is not None:
                await self._pass_on(_data(last), last)
            last = message
            parts.append(_data(message))
        await self._answered(context, worker, status, b"".join(parts))
        if last is not None:
            await self._pass_on(_data(last), last)

    async def _answered(
        self, context: RequestContext, worker: Worker, status: int, body: bytes
    ) -> None:
        """Record a whole answer before the client has its end."""
        if (error := error_in_body(body, status)) is not None:
            await self._failed(context, error)
            return
        self._prefilled(context)
        context.take(Answered(streams=False))
        self._recorder.answered(context)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if context.inbound.endpoint is Endpoint.GENERATE:
            self._recorder.record_answer(context, worker, usage_of_generate(answer))
        elif isinstance(answer, dict):
            self._recorder.record_answer(context, worker, usage_of_openai(answer))
        self._end(context, StreamEnded())

    def _prefilled(self, context: RequestContext) -> None:
        """Note that the prefill worker has done its part, as the decode worker answers."""
        plan = context.attempts.plan
        if plan is not None and plan.prefill is not None:
            context.take(Prefilled())

    async def _failed(self, context: RequestContext, error: EngineError) -> None:
        """Hold an error for or against the workers. The client gets it: the gateway sent once."""
        effect = context.take(Failed(failure_of(error, Cause.ANSWERED)))
        if type(effect) is Abandon:
            await self._health.settle(effect)
        self._recorder.finished(context, error.outcome)
        context.take(ClientGone())

    def _end(
        self,
        context: RequestContext,
        event: ClientGone | StreamBroke | StreamEnded | StreamFailed,
    ) -> None:
        effect = context.take(event)
        assert type(effect) is Finish, "it has not ended before"
        self._recorder.finished(context, effect.outcome)

    # -- messages ------------------------------------------------------------------------------

    async def _send(
        self,
        worker: Worker,
        prefill: Worker | None,
        clients: dict[str, str],
        headers: dict[str, str],
        body: bytes | None,
    ) -> None:
        """Give the gateway the request as the workers shall get it.

        Engines and sidecars obey some headers, so those of ``clients`` do not pass.
        """
        changed = dict(headers)
        if prefill is not None:
            changed[self._options.prefill_header] = prefill.id
        removed = [n for n in clients if n not in changed and n.startswith(_OBEYED)]
        if prefill is None:
            removed.append(self._options.prefill_header)
        if self._handler.keys.checks_clients and "authorization" not in changed:
            removed.append("authorization")
        if body is not None:
            changed["content-length"] = str(len(body))
        write = self._stream.write
        await write(envoy.request_head(self._endpoint(worker), changed, removed))
        if body is not None:
            for message in envoy.request_body(body, end=not self._trailers):
                await write(message)
            if self._trailers:
                await write(envoy.trailers("request_trailers"))

    async def _response(self) -> AsyncGenerator[ProcessingRequest, None]:
        """The messages of a response: its head, the parts of its body, its trailers."""
        begun = False
        while (message := await self._stream.read()) is not None:
            kind = envoy.kind_of(message)
            if kind != "response_headers" and (not begun or kind not in _RESPONSE):
                raise ProtocolError(f"{kind} is no part of a response, or comes too early")
            begun = True
            yield message
            part = message.response_headers or message.response_body
            if part is None or part.end_of_stream:  # trailers are the end
                return
        raise _GoneError

    async def _unrecorded(self, response: AsyncIterator[ProcessingRequest]) -> None:
        """Pass the rest of a response on."""
        async for message in response:
            await self._pass_on(_data(message), message)

    async def _pass_on(self, data: bytes, message: ProcessingRequest) -> None:
        """Answer a part of the response's body, or its trailers."""
        part = message.response_body
        if part is not None or data:
            for answer in envoy.response_body(data, part is not None and part.end_of_stream):
                await self._stream.write(answer)
        if part is None:
            await self._stream.write(envoy.trailers("response_trailers"))

    # -- workers -------------------------------------------------------------------------------

    def _endpoint(self, worker: Worker) -> str:
        """Where the gateway sends a request for a worker."""
        if self._options.decode_port is None or worker.role is Role.REPLICA:
            return worker.id
        host = worker.id.rpartition(":")[0]
        return f"{host}:{self._options.decode_port}"

    def _allowed(self, worker: WorkerView, subset: Collection[str] | None) -> bool:
        return subset is None or self._endpoint(worker_of(worker)) in subset

    def _narrow(self, planned: PlannedTurn, subset: Collection[str]) -> None:
        """Plan within the endpoints that the gateway allows."""
        plan = planned.plan
        if plan is None or self._allowed(plan.decode, subset):
            return
        known = [*self._registry.ready(Role.DECODE), *self._registry.ready(Role.REPLICA)]
        outside = [worker for worker in known if not self._allowed(worker, subset)]
        decision = planned.decision
        if decision.route is Route.LOCAL:
            decision = Decision(Route.REMOTE, Reason.HOME_GONE)
        planned.plan = self._placement.plan(planned, decision, outside)
        if not self._allowed(planned.plan.decode, subset):
            raise WorkerError("no worker that the gateway allows may be given work")


def _data(message: ProcessingRequest) -> bytes:
    """What a message has of a response's body."""
    return b"" if message.response_body is None else message.response_body.body


@contextmanager
def _in_flight(worker: Worker) -> Iterator[None]:
    worker.breaker.sent()
    worker.in_flight += 1
    try:
        yield
    finally:
        worker.in_flight -= 1
