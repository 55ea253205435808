"""The metrics of the answer cache in the router's ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class AnswerCacheMetrics:
    """The metrics of the answer cache.

    Args:
        registry: of the router's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lookups = Counter(
            "ppd_answer_cache",
            "Questions by what the answer cache had: hit, miss, failed",
            ["status"],
            registry=registry,
        )
        self.stored = Counter("ppd_answer_cache_kept", "Answers kept", registry=registry)
        self.seconds = Histogram(
            "ppd_answer_cache_seconds", "Time of a look-up", buckets=_SECONDS, registry=registry
        )
