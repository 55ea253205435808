"""The operators' read access: health, metrics, explained decisions, the decision table.

None of it shows the content of requests. It shows the sessions of all tenants, so clients must
have no access to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.decision_service import decided, parse
from ppd.errors import RequestError
from ppd.forecast import Forecast
from ppd.journal import Reset
from ppd.planning import Planner
from ppd.sessions import SessionIndex
from ppd.table_policy import TablePolicy

from ..config.tables import TableFile
from ..intake.admission import Admission
from ..intake.inbound import Endpoint
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..serving.handler import RequestHandler
from ..wire.access import carries_token
from ..workers.fallbacks import Fallback, Fallbacks
from ..workers.registry import WorkerRegistry
from .peer_state import PeerLoads
from .responses import json_response
from .schemas import (
    Explanation,
    Health,
    ObservedFactor,
    RecentDecisions,
    ResetResult,
    TableState,
    WorkerHealth,
    WorkerState,
)

_MAX_EXPLAINED = 1000


@dataclass(slots=True)
class Admin:
    """The routes that read the router's state, and the reset of a policy's observations.

    Attributes:
        policy_spec: the policy's name and options, as the configuration has them.
        roles: that the policy requires workers for.
        policy: that decides.
        table: the policy's decision table, if any.
        fallbacks: what the router does without.
        token: that operators carry; "": none.
        stopping: the router will soon accept no further requests.
    """

    policy_spec: str
    roles: frozenset[Role]
    planner: Planner
    table: TableFile | None
    registry: WorkerRegistry
    handler: RequestHandler
    index: SessionIndex
    arrivals: ArrivalRate
    backlog: Backlog
    forecast: Forecast
    admission: Admission
    peer_loads: PeerLoads
    journal: Journal
    metrics: Metrics
    fallbacks: Fallbacks
    token: str
    clock: Callable[[], float]
    stopping: bool = False

    def set_policy(self, spec: str, table: TableFile | None) -> None:
        """Replace the policy after a reload of the configuration."""
        self.policy_spec, self.table = spec, table

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of operators to ``app``."""
        app.router.add_get("/workers", self.workers)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/explain", self.recent)
        for endpoint in Endpoint:
            app.router.add_post(f"/explain{endpoint}", self._explainer(endpoint))
        app.router.add_post("/decide", self.decide)
        app.router.add_get("/table", self.show_table)
        app.router.add_post("/table/reset", self.reset)

    async def health(self, request: web.Request) -> web.Response:
        """Return 200 if each role has a live worker and the router is not stopping, else 503.

        A live replica replaces workers of all other roles.
        """
        workers = self.registry.workers
        alive_roles = {w.role for w in workers if w.alive}
        healthy = alive_roles >= self.roles or Role.REPLICA in alive_roles
        states = [WorkerHealth(w.url, w.role, w.alive) for w in workers]
        if self.stopping:
            return json_response(Health("stopping", states), 503)
        if not healthy:
            return json_response(Health("degraded", states), 503)
        return json_response(Health("ok", states))

    async def workers(self, request: web.Request) -> web.Response:
        """Return the state of every worker and its last announcement."""
        peers = await self.peer_loads.in_flight(request)
        return json_response(
            [
                WorkerState(
                    id=worker.id,
                    url=worker.url,
                    role=worker.role,
                    alive=worker.alive,
                    draining=worker.draining,
                    breaker_open=worker.breaker.open,
                    in_flight=None if peers is None else worker.in_flight + peers[worker.url],
                    backlog_tokens=self.backlog.of(worker.identity),
                    handshake=worker.handshake,
                    announced=worker.announcement,
                )
                for worker in self.registry.workers
            ]
        )

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        metrics = self.metrics
        metrics.sessions.set(len(self.index))
        metrics.qps.set(self._qps())
        metrics.waiting.set(self.admission.waiting)
        for fallback, count in self.active_fallbacks().items():
            metrics.fallbacks.labels(fallback).set(count)
        of_workers = (metrics.in_flight, metrics.alive, metrics.breaker_open, metrics.backlog)
        for gauge in (*of_workers, metrics.kv_events_connected):
            gauge.clear()  # drops workers that have left
        for worker in self.registry.workers:
            labels = (worker.role, worker.url)
            metrics.in_flight.labels(*labels).set(worker.in_flight)
            metrics.alive.labels(*labels).set(worker.alive)
            metrics.breaker_open.labels(*labels).set(worker.breaker.open)
            metrics.backlog.labels(*labels).set(self.backlog.of(worker.identity))
            if worker.publishes is not None:
                metrics.kv_events_connected.labels(*labels).set(worker.publishes)
        metrics.observed_factor.clear()
        for factor in self._factors():
            for value in ("ttft", "tpot"):
                gauge = metrics.observed_factor.labels(factor.cell, factor.route, value)
                gauge.set(getattr(factor, value))
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    def active_fallbacks(self) -> dict[Fallback, int]:
        """Return the extent of each fallback; 0: it is not active."""
        return self.fallbacks.counts(self.policy_spec, self.table)

    async def recent(self, request: web.Request) -> web.Response:
        """Return the latest decisions and their outcomes; ``?session=`` and ``?limit=`` select.

        Raises:
            RequestError: the limit is no number in range.
        """
        text = request.query.get("limit", "20")
        if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= _MAX_EXPLAINED):
            raise RequestError(f"limit must be 1..{_MAX_EXPLAINED}, got {text!r}", param="limit")
        decisions = self.journal.recent(int(text), request.query.get("session"))
        return json_response(RecentDecisions(self.policy_spec, decisions))

    def _explainer(
        self, endpoint: Endpoint
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def explain(request: web.Request) -> web.Response:
            """Return the decision that this request would get now, without sending it."""
            headers = self._clients_headers(request)
            query, planned = self.handler.explain(endpoint, headers, await request.read())
            return json_response(
                Explanation(
                    policy=self.policy_spec,
                    tenant=query.tenant,
                    objective=query.objective,
                    features=planned.features,
                    decision=planned.decision,
                )
            )

        return explain

    async def decide(self, request: web.Request) -> web.Response:
        """Return the route of a turn that is given as numbers; nothing is sent or recorded.

        Raises:
            RequestError: a field is wrong.
        """
        headers = self._clients_headers(request)
        return json_response(
            decided(
                parse(await request.read()),
                self.planner,
                self.policy_spec,
                self.handler.objective(headers),
                self._qps(),
            )
        )

    def _clients_headers(self, request: web.Request) -> dict[str, str]:
        """Return a request's headers by lower-case name, without the operators' token."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self.token and carries_token(headers.get("authorization"), self.token):
            del headers["authorization"]  # it is the operator's, not the client's
        return headers

    async def show_table(self, request: web.Request) -> web.Response:
        """Return the decision table, the corrections and what has been observed since."""
        policy, file = self.planner.policy, self.table
        corrections = sorted(policy.corrections) if isinstance(policy, TablePolicy) else []
        record = file.table.record if file else None
        return json_response(
            TableState(
                policy=self.policy_spec,
                corrections=corrections,
                path=str(file.path) if file else None,
                digest=file.digest if file else None,
                model=record.model if record else None,
                shape=record.shape if record else None,
                provenance=record.provenance if record else None,
                qps=self._qps(),
                output_prediction_factor=self.forecast.typically_off,
                observed=self._factors(),
            )
        )

    async def reset(self, request: web.Request) -> web.Response:
        """Delete the policy's observations, so that it uses the table's values again.

        Raises:
            RequestError: the policy has no observations.
        """
        if not isinstance(self.planner.policy, TablePolicy):
            raise RequestError(f"policy {self.policy_spec} observes nothing")
        deleted = len(self._factors())
        self.planner.policy.observed.reset()
        self.journal.reset(Reset(at_s=self.clock()))
        return json_response(ResetResult(deleted))

    def _qps(self) -> float:
        return self.arrivals.per_second(self.clock()) / max(1, self.registry.decode_workers)

    def _factors(self) -> list[ObservedFactor]:
        policy = self.planner.policy
        if not isinstance(policy, TablePolicy) or policy.table is None:
            return []
        cells = policy.table.cells
        return [
            ObservedFactor(
                cell=cells[factor.cell].label,
                route=factor.route,
                turns=factor.turns,
                ttft=factor.ttft,
                tpot=factor.tpot,
            )
            for factor in policy.observed.factors()
        ]
