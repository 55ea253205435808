"""The outcomes of a request: one list for metrics, logs, the decision log and the benches."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; each request has exactly one outcome.

    The values are the label ``outcome`` of the metric ``ppd_finished``.
    """

    OK = "ok"
    FROM_CACHE = "from_cache"  # answered by the router alone
    REJECTED = "rejected"  # a 4xx other than 429
    OVERLOADED = "overloaded"  # a 429, or too many connections
    WORKER_ERROR = "worker_error"  # no worker served it
    TRUNCATED = "truncated"  # its stream broke off
    DISCONNECTED = "disconnected"  # its client closed the connection
    STOPPED = "stopped"  # the router was shut down
    INTERNAL_ERROR = "internal_error"  # a bug of the router
