"""The metrics of the shared store in the router's ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from ..observability.counting import Counts, Histograms

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 60)


class SharedMetrics:
    """The metrics of the shared store.

    Args:
        registry: of the router's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counts(
            "ppd_shared_records_sent",
            "Finished turns by result: written to the shared store, or dropped (the queue is full)",
            ("result",),
            registry,
        )
        self.received = Counts(
            "ppd_shared_records_received",
            "Turns of other routers by result: merged, older (a younger turn or its end is known), "
            "unserved (of a model that this router does not serve)",
            ("result",),
            registry,
        )
        self.unreadable = Counts(
            "ppd_shared_batches_unreadable",
            "Batches of the shared store by reason: foreign_format, malformed",
            ("reason",),
            registry,
        )
        self.responses = Counts(
            "ppd_shared_responses_sent",
            "Stored responses by result: written, dropped (the queue is full), too_large",
            ("result",),
            registry,
        )
        self.visible = Histograms(
            "ppd_shared_visibility_seconds",
            "From the write of a batch to the shared store until this router has merged it",
            (),
            _SECONDS,
            registry,
        )
        self.queue = Gauge("ppd_shared_queue", "Records that wait to be written", registry=registry)
        self.routers = Gauge(
            "ppd_shared_routers",
            "Routers that write to the shared store, this one included",
            registry=registry,
        )
        self.store_bytes = Gauge(
            "ppd_shared_store_bytes",
            "Memory of the records in the shared store, as it reports",
            registry=registry,
        )
        self.problems = Gauge(
            "ppd_shared_problem",
            "1 while a problem of the shared store is present",
            ["kind"],
            registry=registry,
        )
