"""The pool's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class PoolMetrics:
    """All metrics of a pool, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.searches = Counter(
            "ppd_pool_searches_total",
            "Searches that ended: complete, deadline (degraded), refused, failed",
            ("stage", "ending"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "ppd_pool_search_seconds",
            "Time from a search's arrival to its response",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.waiting = self._gauge("ppd_pool_waiting", "Searches that have not begun", "stage")
        self.running = self._gauge("ppd_pool_running", "Searches that have begun")
        self.rows = self._gauge("ppd_pool_rows", "Rows that can be found", "collection")
        self.reserved = self._gauge(
            "ppd_pool_reserved_share", "Share of the work that is prefill's"
        )
        self.expansion_s = self._gauge("ppd_pool_expansion_seconds", "Time of one expansion")
        self.moves = Counter(
            "ppd_pool_control_moves_total",
            "Steps of the control loop, by their effect",
            ("move",),
            registry=self.registry,
        )
        self.writes = Counter(
            "ppd_pool_writes_total",
            "Rows written and deleted, and rebuilds, by kind",
            ("collection", "kind"),
            registry=self.registry,
        )
        self.shard_failures = Counter(
            "ppd_pool_shard_failures_total",
            "Failed requests to replicas",
            ("shard",),
            registry=self.registry,
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)
