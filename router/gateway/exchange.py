"""One HTTP exchange of a gateway: the request is given its workers, the answer is recorded.

The gateway sends the request itself, once. So a turn that fails is not sent to other workers, and
a local turn has no precondition: a decode worker whose KV is gone prefills the whole prompt, within
its own bound.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, aclosing, contextmanager

import msgspec

from ppd.contract import LocalTerms, Role
from ppd.decision import Decision, Reason, Route
from ppd.effects import Cause, ClientGone, Crashed, Finish, Send, StreamBroke
from ppd.errors import EngineError, PpdError, RequestError, WorkerError
from ppd.outcome import Outcome
from ppd.placement import Plan, PlannedTurn, WorkerView

from ..answers import answer_to
from ..intake.catalog import ModelList
from ..intake.inbound import Endpoint
from ..serving.bodies import session_field, with_terms
from ..serving.context import RequestContext
from ..serving.model import ServedModel
from ..workers.group import ModelWorkers
from ..workers.health import worker_of
from ..workers.worker import Worker
from . import envoy
from .messages import GoneError, Messages, ProtocolError, SilentError, Stream
from .routing import Routing
from .turn import Turn

logger = logging.getLogger("ppd.router.gateway")

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_EVENT_STREAM = "text/event-stream"
_MODELS = "/v1/models"
# Headers that engines and sidecars obey, keys, and what would make an answer unreadable.
_OBEYED = (
    *("x-override-", "x-data-parallel-", "x-smg-", "x-prefiller-", "x-bootstrap-"),
    *("x-api-key", "accept-encoding"),
)


class Exchange:
    """One exchange, from its request to the end of its response.

    Args:
        stream: the gateway's messages about it.
        routing: the router's components.
    """

    def __init__(self, stream: Stream, routing: Routing) -> None:
        self._messages = Messages(stream, routing.times, routing.max_body_bytes)
        self._options = routing.options
        self._handler = routing.handler
        self._catalog = routing.catalog

    async def run(self) -> None:
        """Serve the exchange.

        Raises:
            ProtocolError: naming what is wrong.
            SilentError: a response has stopped.
        """
        first = await self._messages.first()
        if first is None:
            return
        head = first.request_headers
        assert head is not None, "it is the first"
        headers = envoy.headers_of(head)
        method, path = headers.get(":method", ""), headers.get(":path", "").partition("?")[0]
        subset = envoy.subset_of(first)
        try:
            if method == "POST" and path in _ENDPOINTS:
                self._handler.keys.tenant(headers)  # before its body is read
                body = b"" if head.end_of_stream else await self._messages.body()
                await self._generation(_ENDPOINTS[path], headers, body, subset)
            elif method == "GET" and path == _MODELS and head.end_of_stream:
                self._handler.charge(headers)
                await self._models(headers, subset)
            else:
                served = ", ".join((*_ENDPOINTS, f"GET {_MODELS}"))
                message = f"{method} {path} is not served behind a gateway; there are {served}"
                raise RequestError(message, status=404)
        except GoneError:
            return
        except (ProtocolError, SilentError):
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            answer = answer_to(error, f"{method} {path}")
            await self._messages.write(envoy.immediate(answer.status, answer.headers, answer.body))

    async def _models(self, headers: dict[str, str], subset: Collection[str] | None) -> None:
        """Send a request for the list of models to the least busy worker that decodes.

        No worker has the names of several models, so the gateway gets those of the router.
        """
        if len(models := self._catalog.models) > 1:
            listed = msgspec.json.encode(ModelList(self._catalog.cards()))
            await self._messages.write(envoy.immediate(200, {}, listed))
            return
        ready = _decoding(models[0])
        fit = [worker for worker in ready if self._allowed(worker, subset)]
        if not fit:
            raise WorkerError("no worker that the gateway allows may be given work")
        worker = min(fit, key=lambda one: one.in_flight)
        with _in_flight(worker):
            await self._send(worker, None, headers, self._handler.keys.forwarded(headers), None)
            async with aclosing(self._messages.response()) as response:
                await anext(response)
                await self._messages.write(envoy.response_head({}))
                await self._messages.pass_all_on(response)

    # -- a turn ------------------------------------------------------------------------------

    async def _generation(
        self,
        endpoint: Endpoint,
        headers: dict[str, str],
        body: bytes,
        subset: Collection[str] | None,
    ) -> None:
        context, trace = await self._handler.begin(endpoint, headers, body)
        model = self._handler.model_of(context)
        try:
            plan = self._plan(context, model, subset)
            worker = worker_of(plan.decode)
            turn = Turn(context, worker, self._messages, model.recorder, model.health)
            try:
                with _in_flight(worker):
                    await self._turn(context, plan, turn, headers)
            except PpdError:
                raise
            except Exception:
                turn.end(Crashed())
                raise
            finally:
                turn.end(ClientGone())
        finally:
            self._handler.end(context, trace)

    def _plan(
        self, context: RequestContext, model: ServedModel, subset: Collection[str] | None
    ) -> Plan:
        """Begin the one attempt.

        Raises:
            PpdError: no worker can take the turn.
        """
        try:
            if subset is not None:
                self._narrow(context.planned, model, subset)
            _keep_from_ranks(context.planned, model)
        except WorkerError:
            model.recorder.finished(context, Outcome.WORKER_ERROR)
            raise
        context.attempts.sees_prefill = context.inbound.stream  # the gateway shows one answer
        effect = context.attempts.start()
        if type(effect) is Send:
            return effect.plan
        assert type(effect) is Finish, "nothing has been sent"
        assert effect.error is not None, "it ends with an error"
        model.recorder.finished(context, effect.outcome)
        raise effect.error

    async def _turn(
        self, context: RequestContext, plan: Plan, turn: Turn, clients: dict[str, str]
    ) -> None:
        inbound, worker = context.inbound, worker_of(plan.decode)
        name = session_field(inbound, context.session, *plan.workers)
        if plan.route is Route.LOCAL:
            body = with_terms(inbound, LocalTerms(), name)
        else:
            body = inbound.with_fields(name)
        async with aclosing(self._messages.response()) as response:
            with ExitStack() as prefilling:
                prefill = None if plan.prefill is None else worker_of(plan.prefill)
                if prefill is not None:
                    prefilling.enter_context(_in_flight(prefill))
                await self._send(worker, prefill, clients, context.headers, body)
                try:
                    message = await anext(response)
                except SilentError as error:
                    text = f"{worker.role} worker did not answer: {error}"
                    late = EngineError(text, status=504)
                    await turn.failed(late, Cause.SILENT)
                    raise late from None
            await self._messages.write(envoy.response_head(context.answer_headers()))
            assert message.response_headers is not None, "a response begins with its head"
            head = envoy.headers_of(message.response_headers)
            served = envoy.served_by(message)
            if served is not None and served != self._endpoint(worker):
                logger.warning("%s has answered instead of %s", served, worker.url)
                turn.foreign()
                await self._messages.pass_all_on(response)
                return
            status = int(head.get(":status", "200"))
            kind = head.get("content-type", "").partition(";")[0].strip().lower()
            try:
                if status == 200 and kind == _EVENT_STREAM:
                    await turn.stream(response)
                else:
                    await turn.whole(status, response)
            except SilentError:
                turn.end(StreamBroke(resumable=False))
                raise

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
            changed[self._options.prefill_header] = prefill.server.id
        removed = [n for n in clients if n not in changed and n.startswith(_OBEYED)]
        if prefill is None:
            removed.append(self._options.prefill_header)
        if self._handler.keys.checks_clients and "authorization" not in changed:
            removed.append("authorization")
        if body is not None:
            changed["content-length"] = str(len(body))
        head = envoy.request_head(self._endpoint(worker), changed, removed)
        await self._messages.send(head, body)

    # -- workers -------------------------------------------------------------------------------

    def _endpoint(self, worker: Worker) -> str:
        """Where the gateway sends a request for a worker."""
        if self._options.decode_port is None or worker.role is Role.REPLICA:
            return worker.server.id
        host = worker.server.id.rpartition(":")[0]
        return f"{host}:{self._options.decode_port}"

    def _allowed(self, worker: WorkerView, subset: Collection[str] | None) -> bool:
        return subset is None or self._endpoint(worker_of(worker)) in subset

    def _narrow(self, planned: PlannedTurn, model: ServedModel, subset: Collection[str]) -> None:
        """Plan within the endpoints that the gateway allows."""
        plan = planned.plan
        if plan is None or self._allowed(plan.decode, subset):
            return
        outside = [
            worker for worker in _decoding(model.workers) if not self._allowed(worker, subset)
        ]
        decision = planned.decision
        if decision.route is Route.LOCAL:
            decision = Decision(Route.REMOTE, Reason.HOME_GONE)
        planned.plan = model.planner.placement.plan(planned, decision, outside)
        if not self._allowed(planned.plan.decode, subset):
            raise WorkerError("no worker that the gateway allows may be given work")


def _keep_from_ranks(planned: PlannedTurn, model: ServedModel) -> None:
    """Plan a local turn of a server with several ranks as a remote one.

    A sidecar forwards remote turns, and SGLang chooses their rank by a room that the sidecar makes.
    """
    plan = planned.plan
    if plan is not None and plan.route is Route.LOCAL and worker_of(plan.decode).has_peers:
        decision = Decision(Route.REMOTE, Reason.UNKNOWN_RANK)
        planned.plan = model.planner.placement.plan(planned, decision, [])


def _decoding(workers: ModelWorkers) -> list[Worker]:
    """The workers of a model that decode and may be given work."""
    return [*workers.ready(Role.DECODE), *workers.ready(Role.REPLICA)]


@contextmanager
def _in_flight(worker: Worker) -> Iterator[None]:
    worker.breaker.sent()
    worker.in_flight += 1
    try:
        yield
    finally:
        worker.in_flight -= 1
