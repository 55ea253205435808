"""The plugin's telemetry: counters in ``/server_info``, metrics, one log line a local prefill.

The queue and the step report events here. The metrics are registered in the scheduler process;
SGLang's own ``/metrics`` endpoint collects their values (``--enable-metrics``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("ppd.engine")

_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class LocalPrefillOutcome(StrEnum):
    """How a request for a local prefill ended; each request has exactly one outcome."""

    PREFILLED = "prefilled"
    TOO_FEW_CACHED_TOKENS = "too_few_cached_tokens"  # refused on arrival
    EVICTED_WHILE_WAITING = "evicted_while_waiting"  # refused when its turn came
    TOO_MANY_TOKENS = "too_many_tokens"
    MALFORMED_TERMS = "malformed_terms"
    MEDIA = "media"  # the request has images, audio or video
    ABORTED = "aborted"  # while it waited or between two chunks


@dataclass(slots=True)
class Progress:
    """The progress of one local prefill.

    Attributes:
        arrived_s: when the request was queued, in ``time.perf_counter`` seconds.
        cached_tokens: prompt tokens that were cached on arrival.
        uncached_tokens: prompt tokens that were not.
        started_s: when its first chunk was scheduled; None before that.
        chunks: chunks scheduled so far.
    """

    arrived_s: float
    cached_tokens: int
    uncached_tokens: int
    started_s: float | None = None
    chunks: int = 0


class _Metrics:
    """The plugin's Prometheus metrics; created only where SGLang collects metrics."""

    def __init__(self, labels: Mapping[str, Any], registry: CollectorRegistry | None) -> None:
        # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR first.
        from prometheus_client import REGISTRY, Gauge, Histogram
        from prometheus_client import Counter as PromCounter

        names, values = list(labels), list(labels.values())
        registry = REGISTRY if registry is None else registry

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, help_text, names, buckets=buckets, registry=registry).labels(
                *values
            )

        def gauge(name: str, help_text: str) -> Any:
            return Gauge(
                name, help_text, names, multiprocess_mode="mostrecent", registry=registry
            ).labels(*values)

        self._values = values
        self._prefills = PromCounter(
            "ppd_engine_local_prefills",
            "Requests for a local append-prefill, by what became of them",
            [*names, "outcome"],
            registry=registry,
        )
        for outcome in LocalPrefillOutcome:
            self._prefills.labels(*values, outcome)
        self.unroomed = PromCounter(
            "ppd_engine_unroomed",
            "Accepted requests that had neither a bootstrap room nor a marker",
            names,
            registry=registry,
        ).labels(*values)
        self.requeued = PromCounter(
            "ppd_engine_requeued",
            "Local requests that lost their KV and were prefilled again from their tokens",
            names,
            registry=registry,
        ).labels(*values)
        self.uncached_tokens = histogram(
            "ppd_engine_uncached_tokens", "Tokens that a local prefill computed", _TOKENS
        )
        self.queue_seconds = histogram(
            "ppd_engine_queue_seconds", "A local request's wait for its first chunk", _SECONDS
        )
        self.prefill_seconds = histogram(
            "ppd_engine_prefill_seconds", "From the first chunk to the end of the last", _SECONDS
        )
        self.chunk_tokens = histogram(
            "ppd_engine_chunk_tokens", "Tokens of a chunk of local prefill", _TOKENS
        )
        self.decode_gap_seconds = histogram(
            "ppd_engine_decode_gap_seconds",
            "Between two tokens of running decodes, where a chunk ran",
            _SECONDS,
        )
        self.append_tokens = gauge(
            "ppd_engine_append_tokens", "Uncached tokens of local requests waiting or in prefill"
        )
        self.waiting = gauge("ppd_engine_waiting", "Local requests that wait")
        self.decode_step_seconds = gauge(
            "ppd_engine_decode_step_seconds", "A decode step without prefill, moving average"
        )

    def ended(self, outcome: LocalPrefillOutcome) -> None:
        self._prefills.labels(*self._values, outcome).inc()


class Telemetry:
    """Counts the events of local prefills and exports them.

    Args:
        labels: the labels of SGLang's own metrics; None where SGLang collects none.
        registry: that metrics are registered in; None: prometheus_client's own, which SGLang
            collects.
    """

    def __init__(
        self, labels: Mapping[str, Any] | None, registry: CollectorRegistry | None = None
    ) -> None:
        self._metrics = None if labels is None else _Metrics(labels, registry)
        self._outcomes: Counter[LocalPrefillOutcome] = Counter()
        self._accepted = self._unroomed = self._requeued = self._chunks = 0
        self._cached_tokens = self._uncached_tokens = 0
        self._longest_gap_ms = 0.0

    def accepted(self, progress: Progress) -> None:
        """Record that a local request was queued."""
        self._accepted += 1
        self._cached_tokens += progress.cached_tokens
        self._uncached_tokens += progress.uncached_tokens

    def unroomed(self, rid: str) -> None:
        """Record that an accepted request had neither a bootstrap room nor a marker."""
        if not self._unroomed:
            logger.warning(
                "rid=%s has no bootstrap room: such requests are prefilled on this decode server "
                "(PPD_UNROOMED=1). This is said once; /server_info counts them",
                rid,
            )
        self._unroomed += 1
        if self._metrics:
            self._metrics.unroomed.inc()

    def ended(self, outcome: LocalPrefillOutcome) -> None:
        """Record how a request for a local prefill ended."""
        self._outcomes[outcome] += 1
        if self._metrics:
            self._metrics.ended(outcome)

    def prefilled(self, rid: str, progress: Progress, now_s: float) -> None:
        """Record that the local prefill of request ``rid`` was completed."""
        assert progress.started_s is not None, "a prefill that was never launched cannot end"
        queued_s = progress.started_s - progress.arrived_s
        prefill_s = now_s - progress.started_s
        logger.info(
            "local prefill: rid=%s new=%d cached=%d chunks=%d queued=%.1fms prefill=%.1fms",
            rid,
            progress.uncached_tokens,
            progress.cached_tokens,
            progress.chunks,
            1e3 * queued_s,
            1e3 * prefill_s,
        )
        self.ended(LocalPrefillOutcome.PREFILLED)
        if self._metrics:
            self._metrics.uncached_tokens.observe(progress.uncached_tokens)
            self._metrics.queue_seconds.observe(queued_s)
            self._metrics.prefill_seconds.observe(prefill_s)

    def requeued(self) -> None:
        """Record that a request lost its KV and was queued again."""
        self._requeued += 1
        if self._metrics:
            self._metrics.requeued.inc()

    def chunk(self, tokens: int) -> None:
        """Record a chunk of local prefill."""
        self._chunks += 1
        if self._metrics:
            self._metrics.chunk_tokens.observe(tokens)

    def decode_gap(self, ms: float) -> None:
        """Record the time between two tokens of running decodes across a chunk."""
        self._longest_gap_ms = max(self._longest_gap_ms, ms)
        if self._metrics:
            self._metrics.decode_gap_seconds.observe(ms / 1e3)

    def load(self, waiting: int, append_tokens: int, decode_ms: float | None) -> None:
        """Export the load of the local queue and the time of a decode step."""
        if self._metrics:
            self._metrics.waiting.set(waiting)
            self._metrics.append_tokens.set(append_tokens)
            if decode_ms is not None:
                self._metrics.decode_step_seconds.set(decode_ms / 1e3)

    def counters(self) -> dict[str, Any]:
        """The counters, named as the fields of ``ppd.contract.WorkerDescription``."""
        return {
            "accepted": self._accepted,
            "unroomed": self._unroomed,
            **{outcome.value: self._outcomes[outcome] for outcome in LocalPrefillOutcome},
            "requeued": self._requeued,
            "chunks": self._chunks,
            "cached_tokens": self._cached_tokens,
            "uncached_tokens": self._uncached_tokens,
            "longest_decode_gap_ms": round(self._longest_gap_ms, 2),
        }
