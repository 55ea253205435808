"""The metrics as Prometheus reads them: gauges are set at that time, and models have labels."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest

from ppd.table_policy import TablePolicy

from ..observability.by_model import ByModel
from ..observability.metrics import Metrics
from ..serving.model import ServedModel
from ..workers.fallbacks import Fallback
from .schemas import ObservedFactor


def update(model: ServedModel, fallbacks: Mapping[Fallback, int], now_s: float) -> None:
    """Set the gauges of a model.

    Args:
        model: whose metrics are changed.
        fallbacks: the extent of each; 0: it is not active.
        now_s: by the router's clock.
    """
    metrics = model.metrics
    metrics.sessions.set(len(model.index))
    metrics.qps.set(model.qps(now_s))
    metrics.waiting.set(model.admission.waiting)
    for fallback, count in fallbacks.items():
        metrics.fallbacks.labels(fallback).set(count)
    of_workers = (metrics.in_flight, metrics.alive, metrics.breaker_open, metrics.backlog)
    for gauge in (*of_workers, metrics.kv_events_connected):
        gauge.clear()  # drops workers that have left
    for worker in model.workers.workers:
        labels = (worker.role, worker.name)
        metrics.in_flight.labels(*labels).set(worker.in_flight)
        metrics.alive.labels(*labels).set(worker.alive)
        metrics.breaker_open.labels(*labels).set(worker.breaker.open)
        metrics.backlog.labels(*labels).set(model.backlog.of(worker.identity))
        if worker.publishes is not None:
            metrics.kv_events_connected.labels(*labels).set(worker.publishes)
    metrics.observed_factor.clear()
    for factor in observed_factors(model):
        for value in ("ttft", "tpot"):
            gauge = metrics.observed_factor.labels(factor.cell, factor.route, value)
            gauge.set(getattr(factor, value))


def exposition(models: Mapping[str, ServedModel], shared: Metrics) -> bytes:
    """Return all metrics in Prometheus' text format.

    Args:
        models: by name.
        shared: of the process, which are those of the model where there is one.
    """
    registry = shared.registry
    if len(models) > 1:
        of_models = {name: model.metrics.registry for name, model in models.items()}
        registry = CollectorRegistry()
        registry.register(ByModel(shared.registry, of_models))
    return generate_latest(registry)


def observed_factors(model: ServedModel) -> list[ObservedFactor]:
    """Return what a model's policy has observed; [] for a policy that observes nothing."""
    policy = model.planner.policy
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
