"""Serves one request: parse, admit, plan, perform effects, relay, record.

Each step of a request's life (docs/ARCHITECTURE.md) is one function here. What follows a failure
is decided by ``ppd.attempts``; this module carries its effects out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import assert_never

from ppd.attempts import Attempts
from ppd.decision import Route
from ppd.effects import (
    Abandon,
    Append,
    ClientGone,
    Crashed,
    Effect,
    Finish,
    Note,
    Prime,
    Relay,
    Send,
    Settled,
    Stopping,
    StreamEnded,
)
from ppd.errors import PpdError, RequestError
from ppd.journal import Decided
from ppd.outcome import Outcome
from ppd.placement import PlannedTurn
from ppd.planning import Query
from ppd.score import Objective, Targets

from ..answers import ErrorAnswer, answer_to, internal_error
from ..intake.inbound import Endpoint
from ..intake.keys import KeyRing
from ..intake.objectives import Objectives
from ..intake.parser import ParsedRequest, RequestParser
from ..intake.rates import Rates
from ..intake.scrub import ANONYMOUS
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..observability.tracing import Trace, Tracing
from .context import RequestContext
from .hooks import LatencyEstimate, RequestHook, complete_while_waiting
from .internal import ServerRequest
from .model import ServedModel
from .relay import StreamRelay, relay_body
from .resume import Resumption
from .samples import serve_samples

logger = logging.getLogger("ppd.router.turns")

_ENDED = StreamEnded()
_NO_HEADERS: Mapping[str, str] = {}
_RETRIED = {"X-PPD-Retried": "1"}  # on an error: the retry is spent
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class RequestHandler:
    """Serves requests of all endpoints, each by one coroutine.

    Args:
        models: by their own names.
        metrics: of requests that end before their model is known.
        max_resumptions: how often a stream may go on on another worker.
        max_body_bytes: of all samples' requests together.
        tracing: None: no spans are made.
        clock: seconds, monotonic.

    Attributes:
        rates: limits in force.
    """

    def __init__(
        self,
        *,
        parser: RequestParser,
        models: Mapping[str, ServedModel],
        journal: Journal,
        metrics: Metrics,
        rates: Rates,
        max_resumptions: int,
        max_body_bytes: int,
        tracing: Tracing | None,
        clock: Callable[[], float],
    ) -> None:
        self._parser = parser
        self._models = models
        # Decisions name the model where there are several.
        self._shown = {name: name if len(models) > 1 else "" for name in models}
        self._journal = journal
        self._metrics = metrics
        self.rates = rates
        self._max_resumptions = max_resumptions
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing
        self._clock = clock

    def reload(self, keys: KeyRing, objectives: Objectives, max_resumptions: int) -> None:
        """Serve later requests by a new configuration."""
        self._parser.keys, self._parser.objectives = keys, objectives
        self._max_resumptions = max_resumptions

    @property
    def keys(self) -> KeyRing:
        """API keys in force."""
        return self._parser.keys

    # -- the life of a request ---------------------------------------------------------------

    async def serve(self, request: ServerRequest, hook: RequestHook | None = None) -> None:
        """Answer one request, whatever it is and whatever becomes of it.

        Args:
            request: the client's, or an internal one.
            hook: completes its body and observes its stream; for requests of one sample.
        """
        arrived_s = self._clock()  # not before: how fast a client sends is not ours
        try:
            parsed = self._parse(request, request.body)
            self._check_samples(parsed.inbound.samples, len(request.body))
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._refuse(request, error, self._begin_trace(request))
            return
        if parsed.inbound.samples > 1:  # each of them comes back here
            await serve_samples(request, parsed.inbound.samples, self.serve)
            return
        trace = self._begin_trace(request)
        model = self._models[parsed.inbound.model]
        try:
            parsed, kv_tokens = await self._admit(request, model, parsed, hook)
        except asyncio.CancelledError:
            self.undecided(request.path, _gone(request), trace)
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._refuse(request, error, trace)
            return
        try:
            try:
                context = self._plan(request.headers, model, parsed, kv_tokens, arrived_s, trace)
            except Exception as error:  # noqa: BLE001 - as above
                self.rates.refund(parsed.query.tenant, kv_tokens)
                self._refuse(request, error, trace)
                return
            try:
                await self._perform(request, model, context, hook)
            finally:
                self._record(model, context, trace)
        finally:
            model.admission.leave()

    def _parse(self, request: ServerRequest, body: bytes) -> ParsedRequest:
        """Check a request, and hash its prefixes.

        Raises:
            RequestError: naming the field at fault.
        """
        if request.method != "POST":
            raise RequestError(f"{request.method} {request.path}: use POST", status=405)
        return self._parser.parse(_ENDPOINTS[request.path], request.headers, body)

    async def _admit(
        self,
        request: ServerRequest,
        model: ServedModel,
        parsed: ParsedRequest,
        hook: RequestHook | None,
    ) -> tuple[ParsedRequest, int]:
        """Charge a request, and wait until it may be served.

        Returns:
            It, completed by its hook, and the KV that it was charged for.

        Raises:
            Overloaded: it may not be served now.
        """
        tenant, admission = parsed.query.tenant, model.admission
        kv_tokens = model.planner.kv_tokens(parsed.query)
        self.rates.charge(tenant, kv_tokens)
        try:
            if hook is None:
                if not admission.enters(kv_tokens):
                    await admission.enter(tenant, kv_tokens)
                return parsed, kv_tokens
            estimate = self._estimate(model, parsed.query, kv_tokens)
            entering = admission.enter(tenant, kv_tokens)
            body = await complete_while_waiting(hook, estimate, entering, admission.leave)
            try:
                parsed = self._parse(request, body)
                more = model.planner.kv_tokens(parsed.query) - kv_tokens
                self.rates.settle(tenant, more)  # what was added takes room, and is paid for
                kv_tokens += more
            except BaseException:
                admission.leave()
                raise
            return parsed, kv_tokens
        except BaseException:
            self.rates.refund(tenant, kv_tokens)
            raise

    def _plan(
        self,
        client_headers: Mapping[str, str],
        model: ServedModel,
        parsed: ParsedRequest,
        kv_tokens: int,
        arrived_s: float,
        trace: Trace | None,
    ) -> RequestContext:
        """Decide the route, and name the workers. Nothing is awaited until they are sent to."""
        inbound, query = parsed
        now_s = self._clock()
        model.arrivals.note(now_s)
        started_s = time.perf_counter()
        planned = model.planner.plan(query, kv_tokens, now_s)
        model.metrics.decision.of().observe(time.perf_counter() - started_s)
        model.planner.sent(query, planned, now_s)
        number = self._journal.next_number()
        self._journal.decided(
            Decided(
                number=number,
                at_s=now_s,
                endpoint=inbound.endpoint,
                tenant=query.tenant,
                objective=query.objective,
                features=planned.features,
                decision=planned.decision,
                model=self._shown[inbound.model],
            )
        )
        headers = self.keys.forwarded(client_headers)
        if trace is not None:
            headers.update(trace.headers)
        return RequestContext(
            number=number,
            session=model.recorder.session(planned.hit),
            inbound=inbound,
            tenant=query.tenant,
            headers=headers,
            clients_key=not self.keys.checks_clients,
            arrived_s=arrived_s,
            planned=planned,
            attempts=Attempts(
                planned,
                model.planner.placement,
                model.backlog,
                number=number,
                max_resumptions=self._max_resumptions,
            ),
            note=model.health.note,
            clock=self._clock,
        )

    async def _perform(
        self,
        request: ServerRequest,
        model: ServedModel,
        context: RequestContext,
        hook: RequestHook | None,
    ) -> None:
        """Carry out one effect after another, until the request has ended."""
        attempts, relay = context.attempts, None
        try:
            effect = attempts.start()
            while True:
                if type(effect) is Send:
                    model.sender.send(context, effect.plan)
                elif type(effect) is Relay:
                    relay = self._relay(request, model, context, effect, hook, relay)
                elif type(effect) is Finish:
                    self._finish(request, model, context, effect, relay)
                    return
                elif type(effect) is Abandon:
                    effect = await self._abandon(model, context, effect)
                    continue
                elif type(effect) is Append:
                    assert relay is not None, "a stream stands still"
                    if not effect.passage:
                        logger.warning("no worker goes on behind a passage: %s", effect.reason)
                        relay.give_passage_up()
                    model.sender.send(context, effect.plan)
                elif type(effect) is Prime:
                    assert relay is not None, "a passage is found while a stream is relayed"
                    relay.prime(effect)
                elif type(effect) is not Note:
                    assert_never(effect)
                effect = context.ready_effect() or await context.next_effect()
        except asyncio.CancelledError:
            if relay is not None and relay.complete:  # the client has left behind the end
                gone = Outcome.OK
                context.take(StreamEnded(well=True))
            else:
                gone = _gone(request)
                context.take(Stopping() if gone is Outcome.STOPPED else ClientGone())
            model.recorder.finished(context, gone)
            if relay is not None:
                relay.close()
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            answer = answer_to(error, f"{request.method} {request.path}")
            context.take(Crashed())
            model.recorder.finished(context, answer.outcome)
            if relay is not None:
                relay.close()
            _respond(request, answer)

    def _relay(
        self,
        request: ServerRequest,
        model: ServedModel,
        context: RequestContext,
        effect: Relay,
        hook: RequestHook | None,
        relay: StreamRelay | None,
    ) -> StreamRelay | None:
        """Pass an answer on: a whole one, the beginning of a stream, or the rest of one."""
        answer, recorder = context.answer, model.recorder
        assert answer is not None
        if relay is not None:
            if relay.resuming:
                recorder.resumed(True)
            relay.go_on(answer)
            return relay
        context.streams = answer.streams
        recorder.answered(context)
        if not answer.streams:
            relay_body(request, context, answer, recorder)
            context.deliver(_ENDED)
            return None
        observer = resumption = None
        if Resumption.possible(context.inbound):
            observer = None if hook is None else hook.observer()
            if self._max_resumptions or observer is not None:
                resumption = Resumption(context.inbound)
        return StreamRelay(request, context, answer, recorder, model.sender, resumption, observer)

    async def _abandon(
        self, model: ServedModel, context: RequestContext, effect: Abandon
    ) -> Effect:
        """Close an attempt's legs, take a dead worker out of service, probe what may be dead."""
        context.close_legs()
        await model.health.settle(effect)
        return context.take(Settled())

    def _finish(
        self,
        request: ServerRequest,
        model: ServedModel,
        context: RequestContext,
        effect: Finish,
        relay: StreamRelay | None,
    ) -> None:
        """Give the client the end of its answer, or the error."""
        model.recorder.finished(context, effect.outcome)
        if relay is not None:
            if effect.outcome is Outcome.TRUNCATED:
                if relay.resuming:
                    model.recorder.resumed(False)
                if effect.error is not None:
                    logger.warning("no worker goes on with a stream: %s", effect.error)
            relay.finish(effect.outcome)
        elif effect.error is not None:
            answer = answer_to(effect.error, f"{request.method} {request.path}")
            _respond(request, answer, _RETRIED if context.attempts.retried else _NO_HEADERS)
        elif not request.answered:  # a bug in a callback, which has been logged
            _respond(request, internal_error("a callback"))

    def _record(self, model: ServedModel, context: RequestContext, trace: Trace | None) -> None:
        """Give back what the request held; charge what was used, nothing if no worker answered."""
        try:
            context.close_legs()
        finally:
            model.recorder.recorded(context)
            if trace is not None:
                answered_at_s = context.attempts.answered_at_s
                outcome = context.outcome or Outcome.INTERNAL_ERROR
                attributes = context.span_attributes() if trace.recorded else None
                trace.end(outcome, attributes, answered_at_s)
            if (used := context.usage) is not None:
                tokens = used.prompt_tokens + used.completion_tokens
                self.rates.settle(context.tenant, tokens - context.kv_tokens)
            elif context.attempts.answered_at_s is None:
                self.rates.refund(context.tenant, context.kv_tokens)

    # -- requests that a gateway sends to the workers ----------------------------------------

    async def begin(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes
    ) -> tuple[RequestContext, Trace | None]:
        """Admit and plan a request; ``end`` must follow.

        Args:
            endpoint: that it was sent to.
            headers: by lower-case name.
            body: all of it.

        Raises:
            RequestError: the request is wrong, or asks for several replies.
            Overloaded: it may not be served now.
        """
        arrived_s = self._clock()
        trace = None if self._tracing is None else self._tracing.begin(endpoint, headers)
        try:
            parsed = self._parser.parse(endpoint, headers, body)
            if (samples := parsed.inbound.samples) > 1:
                message = f"n must be 1 behind a gateway, got {samples}"
                raise RequestError(message, param="n")
            model = self._models[parsed.inbound.model]
            tenant, kv_tokens = parsed.query.tenant, model.planner.kv_tokens(parsed.query)
            self.rates.charge(tenant, kv_tokens)
            try:
                if not model.admission.enters(kv_tokens):
                    await model.admission.enter(tenant, kv_tokens)
            except BaseException:
                self.rates.refund(tenant, kv_tokens)
                raise
        except asyncio.CancelledError:
            self.undecided(endpoint, Outcome.DISCONNECTED, trace)
            raise
        except PpdError as error:
            self.undecided(endpoint, answer_to(error, endpoint).outcome, trace)
            raise
        try:
            return self._plan(headers, model, parsed, kv_tokens, arrived_s, trace), trace
        except Exception:
            self.undecided(endpoint, Outcome.INTERNAL_ERROR, trace)
            self.rates.refund(tenant, kv_tokens)
            model.admission.leave()
            raise

    def end(self, context: RequestContext, trace: Trace | None) -> None:
        """Record the end of a request that ``begin`` has planned."""
        model = self.model_of(context)
        try:
            self._record(model, context, trace)
        finally:
            model.admission.leave()

    def model_of(self, context: RequestContext) -> ServedModel:
        """The model of a request that ``begin`` has planned."""
        return self._models[context.inbound.model]

    # -- requests without a route ------------------------------------------------------------

    @contextmanager
    def not_served_yet(self, request: ServerRequest) -> Iterator[None]:
        """Count a request whose client leaves before ``serve`` is called."""
        try:
            yield
        except asyncio.CancelledError:
            self.undecided(request.path, _gone(request))
            raise

    def charge_request(self, request: ServerRequest) -> None:
        """Charge a request that no worker is needed for.

        Raises:
            RequestError: its sender is unknown, or has reached a limit.
        """
        self.charge(request.headers)
        self.undecided(request.path, Outcome.FROM_CACHE)

    def charge(self, headers: Mapping[str, str]) -> None:
        """Charge one request, of tokens that are not counted.

        Raises:
            RequestError: its sender is unknown, or has reached a limit.
        """
        self.rates.charge(self.keys.tenant(headers) or ANONYMOUS, 0)

    def undecided(self, path: str, outcome: Outcome, trace: Trace | None = None) -> None:
        """Count a request that ended before a route was decided for it."""
        self._metrics.finished.add(path, outcome)
        if trace is not None:
            trace.end(outcome)

    def _refuse(self, request: ServerRequest, error: Exception, trace: Trace | None) -> None:
        answer = answer_to(error, f"{request.method} {request.path}")
        self.undecided(request.path, answer.outcome, trace)
        _respond(request, answer)

    def _begin_trace(self, request: ServerRequest) -> Trace | None:
        if self._tracing is None:
            return None
        return self._tracing.begin(request.path, request.headers)

    # -- what is known of a request ----------------------------------------------------------

    def objective(self, headers: Mapping[str, str]) -> Objective:
        """Return the objective of a sender.

        Raises:
            RequestError: the key is of no tenant, or a header is wrong.
        """
        return self._parser.objective(headers)

    def explain(
        self, endpoint: Endpoint, headers: Mapping[str, str], raw: bytes
    ) -> tuple[str, Query, PlannedTurn]:
        """What would be decided about a request now; nothing is sent or recorded.

        Returns:
            The name of its model where there are several, its query, and the decision.

        Raises:
            RequestError: the request is wrong.
        """
        inbound, query = self._parser.parse(endpoint, headers, raw)
        planner = self._models[inbound.model].planner
        planned = planner.plan(query, planner.kv_tokens(query), self._clock())
        return self._shown[inbound.model], query, planned

    def _check_samples(self, count: int, body_bytes: int) -> None:
        if count > 1 and count * body_bytes > self._max_body_bytes:
            message = f"{count} samples of such a body are more than {self._max_body_bytes} bytes"
            raise RequestError(message, status=413, param="n")

    def _estimate(self, model: ServedModel, query: Query, kv_tokens: int) -> LatencyEstimate:
        decision = model.planner.plan(query, kv_tokens, self._clock()).decision
        target_ms = query.objective.ttft_ms if isinstance(query.objective, Targets) else None
        costs = decision.assessment
        if costs is None:
            return LatencyEstimate(0.0, target_ms)
        chosen = costs.local if decision.route is Route.LOCAL else costs.remote
        return LatencyEstimate(chosen.ttft_ms, target_ms)


def _gone(request: ServerRequest) -> Outcome:
    """Why an answer is no longer awaited: the client has left, unless the router stops."""
    return Outcome.STOPPED if request.connection.stopping else Outcome.DISCONNECTED


def _respond(
    request: ServerRequest, answer: ErrorAnswer, extra_headers: Mapping[str, str] = _NO_HEADERS
) -> None:
    if request.answered:
        request.abort()
    else:
        headers = {"Content-Type": "application/json", **answer.headers, **extra_headers}
        request.respond(answer.status, answer.body, headers)
