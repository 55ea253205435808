"""The operators' read access: health, metrics, explained decisions, the decision table.

None of it shows the content of requests. It shows the sessions of all tenants, so clients must
have no access to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ppd.contract import Role
from ppd.decision_service import decided, parse
from ppd.errors import RequestError
from ppd.journal import Reset
from ppd.table_policy import TablePolicy

from ..intake.inbound import Endpoint, unknown_model
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..serving.handler import RequestHandler
from ..serving.model import ServedModel
from ..shared.sharing import Sharing
from ..wire.access import carries_token
from ..workers.fallbacks import Fallback
from ..workers.registry import WorkerRegistry
from ..workers.worker import Server
from .peer_state import PeerLoads
from .responses import json_response
from .schemas import (
    Explanation,
    Health,
    RecentDecisions,
    ResetResult,
    TableState,
    WorkerHealth,
    WorkerState,
)
from .scrape import exposition, observed_factors, update

_MAX_EXPLAINED = 1000


@dataclass(slots=True)
class Admin:
    """The routes that read the router's state, and the reset of a policy's observations.

    Attributes:
        policy_spec: the policy's name and options, as the configuration has them.
        roles: that the policy requires workers for.
        models: that are served, by name.
        metrics: of the process, which are those of the model where there is one.
        sharing: with other routers; None without it.
        token: that operators carry; "": none.
        stopping: the router will soon accept no further requests.
    """

    policy_spec: str
    roles: frozenset[Role]
    models: Mapping[str, ServedModel]
    registry: WorkerRegistry
    handler: RequestHandler
    peer_loads: PeerLoads
    journal: Journal
    metrics: Metrics
    sharing: Sharing | None
    token: str
    clock: Callable[[], float]
    stopping: bool = False

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

        A live replica replaces workers of all other roles, and with ``decode_fallback`` a decode
        worker replaces prefill workers. Of several models, one must be complete: the others'
        requests are refused by themselves.
        """
        healthy = any(self.is_complete(model) for model in self.models.values())
        states = [
            WorkerHealth(server.url, server.role, server.alive, self.shown_model(server))
            for server in self.registry.servers
        ]
        if self.stopping:
            return json_response(Health("stopping", states), 503)
        if not healthy:
            return json_response(Health("degraded", states), 503)
        return json_response(Health("ok", states))

    def is_complete(self, model: ServedModel) -> bool:
        """Return whether a model has the live workers that its requests need."""
        alive_roles = {w.role for w in model.workers.workers if w.alive}
        if alive_roles >= self.roles or Role.REPLICA in alive_roles:
            return True
        return Role.REPLICA not in self.roles and model.fallbacks.decode_workers_could

    def model_of(self, server: Server) -> ServedModel:
        """Return the model that a server serves."""
        return self.models[self.registry.served_by(server).name]

    def shown_model(self, server: Server) -> str:
        """Return the name of a server's model where there are several, else ""."""
        return self.model_of(server).name if len(self.models) > 1 else ""

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
                    in_flight=None if peers is None else worker.in_flight + peers[worker.id],
                    backlog_tokens=self.model_of(worker.server).backlog.of(worker.identity),
                    handshake=worker.handshake,
                    announced=worker.server.announcement,
                    model=self.shown_model(worker.server),
                )
                for worker in self.registry.workers
            ]
        )

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        now_s = self.clock()
        for model in self.models.values():
            update(model, self.fallbacks_of(model), now_s)
        if self.sharing is not None:
            self.sharing.show()
        return web.Response(
            body=exposition(self.models, self.metrics),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    def active_fallbacks(self) -> dict[Fallback, int]:
        """Return the extent of each fallback, over all models; 0: it is not active."""
        total = dict.fromkeys(Fallback, 0)
        for model in self.models.values():
            for fallback, count in self.fallbacks_of(model).items():
                total[fallback] += count
        return total

    def fallbacks_of(self, model: ServedModel) -> dict[Fallback, int]:
        """Return the extent of each fallback of a model."""
        return model.fallbacks.counts(self.policy_spec, model.table)

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
            model, query, planned = self.handler.explain(endpoint, headers, await request.read())
            table = self._named(model or None).table
            return json_response(
                Explanation(
                    policy=self.policy_spec,
                    tenant=query.tenant,
                    objective=query.objective,
                    features=planned.features,
                    decision=planned.decision,
                    model=model,
                    table="" if table is None else str(table),
                )
            )

        return explain

    async def decide(self, request: web.Request) -> web.Response:
        """Return the route of a turn that is given as numbers; nothing is sent or recorded.

        Raises:
            RequestError: a field is wrong.
        """
        headers = self._clients_headers(request)
        given = parse(await request.read())
        model = self._named(given.model)
        return json_response(
            decided(
                given,
                model.planner,
                self.policy_spec,
                self.handler.objective(headers),
                model.qps(self.clock()),
            )
        )

    def _named(self, name: str | None) -> ServedModel:
        """Return the model of a name; of the one model, whatever the name is.

        Raises:
            RequestError: no model has the name, or there are several and none is named.
        """
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            known = ", ".join(self.models)
            raise RequestError(f"model must name one of {known}", param="model")
        if name not in self.models:
            raise unknown_model(name, self.models)
        return self.models[name]

    def _clients_headers(self, request: web.Request) -> dict[str, str]:
        """Return a request's headers by lower-case name, without the operators' token."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self.token and carries_token(headers.get("authorization"), self.token):
            del headers["authorization"]  # it is the operator's, not the client's
        return headers

    async def show_table(self, request: web.Request) -> web.Response:
        """Return the decision table, the corrections and what has been observed since.

        Raises:
            RequestError: of several models, none is named, or one that is not served.
        """
        model = self._named(request.query.get("model"))
        policy, file = model.planner.policy, model.table
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
                qps=model.qps(self.clock()),
                output_prediction_factor=model.forecast.typically_off,
                observed=observed_factors(model),
            )
        )

    async def reset(self, request: web.Request) -> web.Response:
        """Delete the policy's observations, so that it uses the table's values again.

        Those of all models are deleted, unless one is named.

        Raises:
            RequestError: the policy has no observations, or no model has the name.
        """
        name = request.query.get("model")
        models = list(self.models.values()) if name is None else [self._named(name)]
        deleted = 0
        for model in models:
            policy = model.planner.policy
            if not isinstance(policy, TablePolicy):
                raise RequestError(f"policy {self.policy_spec} observes nothing")
            deleted += len(observed_factors(model))
            policy.reset()
            shown = model.name if len(self.models) > 1 else ""
            self.journal.reset(Reset(at_s=self.clock(), model=shown))
        return json_response(ResetResult(deleted))
