"""Construction of the served models, each with its own parts of the router."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.choice import ByLoad, PlacementRule
from ppd.decision import Policy
from ppd.forecast import Forecast
from ppd.placement import Placement
from ppd.planning import Planner
from ppd.sessions import SessionIndex
from ppd.shared import SharedPrefixes

from ..config.options import RouterConfig
from ..config.table_files import TableFile
from ..config.tables import make_policy
from ..intake.admission import Admission
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..serving.model import ServedModel
from ..serving.recorder import RequestRecorder
from ..serving.sending import Sender
from ..shared.sharing import Sharing
from ..wire.client import Upstreams
from ..workers.fallbacks import Fallbacks
from ..workers.group import ModelWorkers
from ..workers.health import WorkerHealth
from ..workers.registry import WorkerRegistry

Policies = Mapping[str, tuple[Policy, TableFile | None]]  # by model


def make_policies(config: RouterConfig, registry: WorkerRegistry) -> Policies:
    """Return the policy of each model, and its decision table, if any.

    Raises:
        TableError: a table cannot be read, is malformed, or is for another model.
    """
    return {
        one.name: make_policy(config, one.models, one.shape, one.machines)
        for one in registry.models
    }


def tables_of(policies: Policies) -> dict[str, TableFile | None]:
    """Return the table of each policy, by model."""
    return {model: table for model, (_, table) in policies.items()}


def make_models(
    config: RouterConfig,
    policies: Policies,
    registry: WorkerRegistry,
    journal: Journal,
    upstreams: Upstreams,
    metrics: Metrics,
    sharing: Sharing | None,
    clock: Callable[[], float],
) -> dict[str, ServedModel]:
    """Return the served models by name.

    Args:
        config: of this process.
        policies: of each model.
        registry: the workers.
        journal: of decisions.
        upstreams: connections to workers.
        metrics: of the process, which are those of the model where there is one.
        sharing: with other routers; None without it.
        clock: seconds, monotonic.
    """
    several = len(registry.models) > 1

    def make(workers: ModelWorkers) -> ServedModel:
        policy, table = policies[workers.name]
        own = Metrics() if several else metrics
        arrivals, backlog, forecast = ArrivalRate(), Backlog(), Forecast()
        capacity = max(1, config.session_capacity // len(registry.models))
        index = SessionIndex(capacity=capacity, ttl_s=config.session_ttl_s)
        share = None if sharing is None else sharing.serve(workers.name, index, backlog)
        limits = config.admission_of(workers.name)
        admission = Admission(limits, workers.has_room, own, clock)
        workers.on_change = admission.admit_next
        queued = backlog if sharing is None else sharing.load
        by_load = config.placement is PlacementRule.LOAD
        placement = Placement(
            workers,
            decode_fallback=config.decode_fallback,
            chooser=ByLoad(workers, queued) if by_load else None,
        )
        planner = Planner(
            policy=policy,
            placement=placement,
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
            shared=SharedPrefixes() if by_load else None,
            loads=None if sharing is None else sharing.load,
            processes=config.processes,
        )
        health = WorkerHealth(registry, own)
        return ServedModel(
            workers=workers,
            planner=planner,
            table=table,
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
            admission=admission,
            health=health,
            sender=Sender(upstreams, health, lambda: random.getrandbits(63)),
            recorder=RequestRecorder(
                index=index,
                planner=planner,
                forecast=forecast,
                journal=journal,
                metrics=own,
                clock=clock,
                new_session=lambda: random.getrandbits(48),
                share=share,
            ),
            metrics=own,
            fallbacks=Fallbacks(
                workers,
                decode_fallback=config.decode_fallback,
                kv_events=config.kv_events,
                shown=workers.name if several else "",
                store_problems=lambda: 0 if sharing is None else len(sharing.problems()),
            ),
        )

    return {workers.name: make(workers) for workers in registry.models}
