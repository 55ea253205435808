"""Serving one request: look up its conversation, decide, dispatch, pass on the answer.

This is the life of a request (docs/ARCHITECTURE.md) in one page; the steps are
``requests.py``'s, ``ppd.judge``'s, ``dispatch.py``'s and ``relay.py``'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from ppd.arrivals import ArrivalRate
from ppd.errors import WorkerError
from ppd.journal import Decided
from ppd.judge import Judge, Judgement, Query

from .course import Course
from .dispatch import Dispatcher
from .journal import Journal
from .ledger import Ledger
from .legs import LegFailed
from .metrics import Metrics
from .relay import relay_body, relay_stream
from .requests import Endpoint, Inbound, Served, parse
from .scrub import ANONYMOUS, FORWARDED_HEADERS, tenant_of
from .wishes import WishBook
from .workers import WorkerPool


class TurnServer:
    """Serves requests of all endpoints.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        judge: Judge,
        arrivals: ArrivalRate,
        wishes: WishBook,
        dispatcher: Dispatcher,
        ledger: Ledger,
        journal: Journal,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._judge = judge
        self._arrivals = arrivals
        self._wishes = wishes
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._journal = journal
        self._metrics = metrics
        self._clock = clock

    async def serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Raises:
        RequestError: the request is wrong.
        WorkerError: no worker is left to serve it.
        LegFailed: a worker failed or refused before the first byte.
        """
        raw = await request.read()
        arrived_s = self._clock()  # not before: how fast a client sends is not ours
        inbound, query = self._read(request, endpoint, raw)
        self._arrivals.note(arrived_s)
        course = self._decide(request, inbound, query, arrived_s)
        try:
            async with self._dispatcher.answer(course) as answer:
                self._ledger.answered(course)
                if inbound.stream:
                    return await relay_stream(request, course, answer, self._ledger)
                return relay_body(course, answer, self._ledger)
        except asyncio.CancelledError:  # aiohttp cancels the handler when the client hangs up
            self._ledger.finished(course, "disconnected")
            raise
        except LegFailed as failure:
            self._ledger.closed(course, failure.outcome)
            raise
        except WorkerError:
            self._ledger.closed(course, "worker_error")
            raise
        finally:
            self._ledger.closed(course, course.outcome or "internal_error")

    async def explain(self, request: web.Request, endpoint: Endpoint) -> tuple[Query, Judgement]:
        """What would be decided about a request now; nothing is sent or remembered.

        Raises:
            RequestError: the request is wrong.
        """
        _, query = self._read(request, endpoint, await request.read())
        return query, self._judge.judge(query, self._clock())

    def _read(self, request: web.Request, endpoint: Endpoint, raw: bytes) -> tuple[Inbound, Query]:
        tenant = tenant_of(request.headers.get("Authorization"))
        inbound = parse(endpoint, raw, tenant, Served(self._pool.models, self._pool.vocab_size))
        name = tenant or ANONYMOUS
        query = Query(
            kind=endpoint,
            chain=inbound.chain,
            body_bytes=len(raw),
            tenant=name,
            most_tokens=inbound.most_tokens,
            objective=self._wishes.of(name, request.headers),
        )
        return inbound, query

    def _decide(
        self, request: web.Request, inbound: Inbound, query: Query, arrived_s: float
    ) -> Course:
        started_s = time.perf_counter()
        judged = self._judge.judge(query, arrived_s)
        self._metrics.decision.observe(time.perf_counter() - started_s)
        number = self._journal.next_number()
        self._journal.decided(
            Decided(
                number=number,
                at_s=arrived_s,
                endpoint=inbound.endpoint,
                tenant=query.tenant,
                objective=query.objective,
                features=judged.features,
                decision=judged.decision,
            )
        )
        return Course(
            number=number,
            inbound=inbound,
            tenant=query.tenant,
            headers={h: request.headers[h] for h in FORWARDED_HEADERS if h in request.headers},
            arrived_s=arrived_s,
            judged=judged,
            decision=judged.decision,
        )
