"""The page of metrics, from the registries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from router.answer_cache.metrics import AnswerCacheMetrics
from router.observability.metrics import Metrics
from router.pool.metrics import PoolMetrics
from router.retrieval.metrics import RetrievalMetrics
from router.shared.metrics import SharedMetrics
from sglang_patches.telemetry import Telemetry

from .tables import code, sentence, table

_INTRODUCTION = """\
# Metrics

All metrics are in Prometheus' text format.
[A Grafana dashboard](../grafana-dashboard.json) shows those of the router and of the plugin.

"""
_SUFFIXES = {"counter": "_total"}
_SGLANG_LABELS = {"of_sglang": ""}  # stands for those that SGLang gives its own metrics


def page() -> str:
    """The page, in Markdown."""
    return _INTRODUCTION + "\n".join(
        f"## {heading}\n\n{where}\n\n{_table(registry)}" for heading, where, registry in _sources()
    )


def names() -> set[str]:
    """The names of all metrics, as queries use them."""
    return {row[0] for _, _, registry in _sources() for row in _rows(registry)}


def _sources() -> Iterator[tuple[str, str, CollectorRegistry]]:
    yield "The router", "`GET /metrics` of each process.", Metrics().registry
    retrieval, cache, shared, plugin = (CollectorRegistry() for _ in range(4))
    RetrievalMetrics(retrieval)
    yield "Retrieval", "Beside the router's, with `[retrieval]` in its file.", retrieval
    AnswerCacheMetrics(cache)
    yield "The answer cache", "Beside the router's, with `[answer_cache]` in its file.", cache
    SharedMetrics(shared)
    yield "The shared store", "Beside the router's, with `[shared]` in its file.", shared
    Telemetry(_SGLANG_LABELS, plugin)
    where = "In SGLang's own `/metrics`, with `--enable-metrics` and with SGLang's labels."
    yield "The plugin", where, plugin
    yield "The pool", "`GET /metrics` of `ppd-pool serve`.", PoolMetrics().registry


def _table(registry: CollectorRegistry) -> str:
    return table(
        ("metric", "type", "labels", "meaning"),
        ((code(name), kind, labels, meaning) for name, kind, labels, meaning in _rows(registry)),
    )


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    # A collector without samples has no public way to its labels.
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        (family,) = collector.collect()
        names: Any = getattr(collector, "_labelnames", ()) or getattr(collector, "_labels", ())
        labels = [name for name in names if name not in _SGLANG_LABELS]
        name = family.name + _SUFFIXES.get(family.type, "")
        yield name, family.type, ", ".join(map(code, labels)), sentence(family.documentation)
