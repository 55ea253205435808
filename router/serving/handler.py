"""Serving one request: look up its conversation, decide, dispatch, pass on the answer.

This is the life of a request (docs/ARCHITECTURE.md) in one page; the steps are
``requests.py``'s, ``ppd.planner``'s, ``dispatch.py``'s and ``relay.py``'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ppd.arrivals import ArrivalRate
from ppd.decision import Policy, Route
from ppd.errors import RequestError
from ppd.journal import Decided
from ppd.planning import Judgement, Planner, Query
from ppd.score import Targets

from ..answers import ErrorAnswer, answer_to
from ..intake.admission import Admission
from ..intake.inbound import Endpoint, Inbound, Served
from ..intake.keys import KeyRing
from ..intake.objectives import Objectives
from ..intake.rates import Rates
from ..intake.requests import parse
from ..intake.scrub import ANONYMOUS
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..observability.tracing import Trace, Tracing
from ..workers.registry import WorkerRegistry
from .context import RequestContext
from .dispatch import Dispatcher
from .hooks import LatencyEstimate, RequestHook, completed
from .internal import Asked
from .ledger import Ledger
from .relay import STOPPED, relay_body, relay_stream
from .samples import serve_samples

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class RequestHandler:
    """Serves requests of all endpoints.

    Args:
        max_body_bytes: of all samples' requests together.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        pool: WorkerRegistry,
        planner: Planner,
        arrivals: ArrivalRate,
        objectives: Objectives,
        dispatcher: Dispatcher,
        ledger: Ledger,
        journal: Journal,
        metrics: Metrics,
        keys: KeyRing,
        rates: Rates,
        admission: Admission,
        max_resumptions: int,
        max_body_bytes: int,
        tracing: Tracing | None,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._planner = planner
        self._arrivals = arrivals
        self._objectives = objectives
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._journal = journal
        self._metrics = metrics
        self.keys = keys
        self.rates = rates
        self._admission = admission
        self._max_resumptions = max_resumptions
        self._max_body_bytes = max_body_bytes
        self._tracing = tracing
        self._clock = clock

    def reload(self, keys: KeyRing, objectives: Objectives, max_resumptions: int) -> None:
        """As they are configured now."""
        self.keys, self._objectives = keys, objectives
        self._max_resumptions = max_resumptions

    def set_policy(self, policy: Policy) -> None:
        self._planner.policy = policy

    @contextmanager
    def not_served_yet(self, request: Asked) -> Iterator[None]:
        """For what is done before ``serve``: whoever leaves meanwhile is counted."""
        try:
            yield
        except asyncio.CancelledError:
            self.undecided(request.path, _left(request))
            raise

    async def serve(self, request: Asked, companion: RequestHook | None = None) -> None:
        """Answer one request, whatever it is and whatever becomes of it.

        Args:
            companion: of requests of one sample.
        """
        arrived_s = self._clock()  # not before: how fast a client sends is not ours
        try:
            if request.method != "POST":
                raise RequestError(f"{request.method} {request.path}: use POST", status=405)
            endpoint = _ENDPOINTS[request.path]
            inbound, query = self._read(endpoint, request.headers, request.body)
            self._check_samples(inbound.samples, len(request.body))
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._turn_down(request, error, self._begin_trace(request))
            return
        if inbound.samples > 1:  # each of them comes back here
            await serve_samples(request, inbound.samples, self.serve)
        else:
            trace = self._begin_trace(request)
            await self._serve(request, inbound, query, arrived_s, trace, companion)

    def _check_samples(self, count: int, body_bytes: int) -> None:
        """Raises:
        RequestError: they are too large together.
        """
        if count > 1 and count * body_bytes > self._max_body_bytes:
            told = f"{count} samples of such a body are more than {self._max_body_bytes} bytes"
            raise RequestError(told, status=413, param="n")

    async def _serve(
        self,
        request: Asked,
        inbound: Inbound,
        query: Query,
        arrived_s: float,
        trace: Trace | None,
        companion: RequestHook | None,
    ) -> None:
        try:
            context = await self._let_in(request, inbound, query, arrived_s, companion)
        except asyncio.CancelledError:
            self.undecided(request.path, _left(request), trace)
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            self._turn_down(request, error, trace)
            return
        try:
            if trace is not None:
                trace.follow(context)
            await self._answer(request, context, companion)
        finally:
            try:
                self._over(context, trace)
            finally:
                self._admission.leave()

    async def _let_in(
        self,
        request: Asked,
        inbound: Inbound,
        query: Query,
        arrived_s: float,
        companion: RequestHook | None,
    ) -> RequestContext:
        """Charge the request, wait until it may be served, decide its route.

        Raises:
            Overloaded: it may not.
        """
        kv_tokens = self._planner.kv_tokens(query, inbound.prompts)
        self.rates.charge(query.tenant, kv_tokens)
        try:
            body = None
            if companion is None:
                await self._admission.enter(query.tenant, kv_tokens)
            else:
                outlook = self._outlook(query)
                entering = self._admission.enter(query.tenant, kv_tokens)
                body = await completed(companion, outlook, entering, self._admission.leave)
            try:
                if body is not None:  # what came to it takes room, and is paid for
                    inbound, query = self._read(inbound.endpoint, request.headers, body)
                    more = self._planner.kv_tokens(query, inbound.prompts) - kv_tokens
                    self.rates.settle(query.tenant, more)
                    kv_tokens += more
                return self._decide(request.headers, inbound, query, arrived_s, kv_tokens)
            except BaseException:
                self._admission.leave()
                raise
        except BaseException:
            self.rates.refund(query.tenant, kv_tokens)
            raise

    def _outlook(self, query: Query) -> LatencyEstimate:
        decision = self._planner.plan(query, self._clock()).decision
        target_ms = query.objective.ttft_ms if isinstance(query.objective, Targets) else None
        costs = decision.assessment
        if costs is None:
            return LatencyEstimate(0.0, target_ms)
        chosen = costs.local if decision.route is Route.LOCAL else costs.remote
        return LatencyEstimate(chosen.ttft_ms, target_ms)

    async def _answer(
        self, request: Asked, context: RequestContext, companion: RequestHook | None
    ) -> None:
        try:
            answer = await self._dispatcher.answer(context)
            self._ledger.answered(context)
            if answer.streams:
                await relay_stream(
                    request,
                    context,
                    answer,
                    self._ledger,
                    self._dispatcher,
                    self._max_resumptions,
                    companion.reader() if companion is not None else None,
                )
            else:
                relay_body(request, context, answer, self._ledger)
        except asyncio.CancelledError:
            self._ledger.finished(context, _left(request))
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
            told = answer_to(error, f"{request.method} {request.path}")
            self._ledger.finished(context, told.outcome)
            _tell(request, told)

    def _over(self, context: RequestContext, trace: Trace | None) -> None:
        """Give back what the request held; charge what was used, nothing if no worker spoke."""
        outcome = context.outcome or "internal_error"
        context.close()
        self._ledger.closed(context, outcome)
        if trace is not None:
            trace.end(outcome)
        if (used := context.usage) is not None:
            took = used.prompt_tokens + used.completion_tokens
            self.rates.settle(context.tenant, took - context.kv_tokens)
        elif context.first_byte_s is None:
            self.rates.refund(context.tenant, context.kv_tokens)

    def _turn_down(self, request: Asked, error: Exception, trace: Trace | None) -> None:
        """Nothing has been decided about the request, and nothing will."""
        told = answer_to(error, f"{request.method} {request.path}")
        self.undecided(request.path, told.outcome, trace)
        _tell(request, told)

    def charge_request(self, request: Asked) -> None:
        """One that no worker is needed for.

        Raises:
            RequestError: who asks is not known, or may not ask now.
        """
        self.charge(request.headers)
        self.undecided(request.path, "from_cache")

    def charge(self, headers: Mapping[str, str]) -> None:
        """One request, of tokens that nobody counts.

        Raises:
            RequestError: who asks is not known, or may not ask now.
        """
        self.rates.charge(self.keys.tenant(headers) or ANONYMOUS, 0)

    def undecided(self, path: str, outcome: str, trace: Trace | None = None) -> None:
        """A request ended before anything was decided about it."""
        self._metrics.finished.add(path, outcome)
        if trace is not None:
            trace.end(outcome)

    def _begin_trace(self, request: Asked) -> Trace | None:
        if self._tracing is None:
            return None
        return self._tracing.begin(request.path, request.headers)

    def explain(
        self, endpoint: Endpoint, headers: Mapping[str, str], raw: bytes
    ) -> tuple[Query, Judgement]:
        """What would be decided about a request now; nothing is sent or remembered.

        Raises:
            RequestError: the request is wrong.
        """
        _, query = self._read(endpoint, headers, raw)
        return query, self._planner.plan(query, self._clock())

    def _read(
        self, endpoint: Endpoint, headers: Mapping[str, str], raw: bytes
    ) -> tuple[Inbound, Query]:
        """
        Args:
            headers: by lower-case name.
        """
        tenant = self.keys.tenant(headers)
        served = Served(self._pool.models, self._pool.vocab_size)
        session = headers.get("x-session-id", "")
        inbound = parse(endpoint, raw, tenant, served, session)
        name = tenant or ANONYMOUS
        query = Query(
            kind=endpoint,
            chain=inbound.chain,
            body_bytes=len(raw),
            tenant=name,
            max_reply_tokens=inbound.max_reply_tokens,
            objective=self._objectives.of(name, headers),
        )
        return inbound, query

    def _decide(
        self,
        headers: Mapping[str, str],
        inbound: Inbound,
        query: Query,
        arrived_s: float,
        kv_tokens: int,
    ) -> RequestContext:
        now_s = self._clock()
        self._arrivals.note(now_s)
        started_s = time.perf_counter()
        judged = self._planner.plan(query, now_s)
        self._metrics.decision.of().observe(time.perf_counter() - started_s)
        number = self._journal.next_number()
        self._journal.decided(
            Decided(
                number=number,
                at_s=now_s,
                endpoint=inbound.endpoint,
                tenant=query.tenant,
                objective=query.objective,
                features=judged.features,
                decision=judged.decision,
            )
        )
        return RequestContext(
            number=number,
            session=self._ledger.session(judged.hit),
            inbound=inbound,
            tenant=query.tenant,
            kv_tokens=kv_tokens,
            headers=self.keys.forwarded(headers),
            clients_key=not self.keys.judges,
            arrived_s=arrived_s,
            judged=judged,
            decision=judged.decision,
        )


def _left(request: Asked) -> str:
    """Why nobody waits for an answer any more: the client hung up, unless the router ends it."""
    return STOPPED if request.connection.stopping else "disconnected"


def _tell(request: Asked, told: ErrorAnswer) -> None:
    if request.answered:
        request.abort()
    else:
        headers = {"Content-Type": "application/json", **told.headers}
        request.respond(told.status, told.body, headers)
