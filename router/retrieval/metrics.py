"""The metrics of retrieval in the router's ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RetrievalMetrics:
    """The metrics of retrieval.

    Args:
        registry: of the router's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.searches = Counter(
            "ppd_retrieval",
            "Searches by stage and status: ok, degraded (the deadline came first), failed",
            ["stage", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "ppd_retrieval_seconds",
            "Time of a search, as the request waited for it",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.stalled = Counter(
            "ppd_retrieval_stalled_seconds",
            "Time in which streams waited to go on behind a passage",
            registry=registry,
        )
        self.passages = Counter(
            "ppd_retrieval_passages",
            "Passages by how: found for a turn, appended in mid-reply, declined by "
            "the worker, put_back into a resent history",
            ["how"],
            registry=registry,
        )

    def add_stall(self, seconds: float) -> None:
        """Add a time in which a stream waited for a passage."""
        self.stalled.inc(seconds)
