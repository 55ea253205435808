"""The router's Prometheus metrics. Label values are the enum values of ``ppd.decision``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from .counting import Counts, Histograms

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


def turn_label(number: int) -> str:
    """Return the label of a turn's number: ``1``, ``2`` or ``3+``."""
    return str(number) if number < 3 else "3+"


class Metrics:
    """All metrics of a router process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counts(
            "ppd_turns",
            "Requests by route and reason (a turn refused locally counts once, as remote)",
            ("endpoint", "route", "reason"),
            self.registry,
        )
        self.finished = Counts(
            "ppd_finished",
            "Requests by outcome: ok, rejected (the client's error), overloaded (429, 503), "
            "worker_error, truncated, disconnected, stopped (with the router), internal_error, "
            "from_cache",
            ("endpoint", "outcome"),
            self.registry,
        )
        self.refused_entry = Counter(
            "ppd_admission_refused",
            "Requests answered 429: queue_full, deadline, rate",
            ["reason"],
            registry=self.registry,
        )
        self.waited = Histograms(
            "ppd_admission_wait_seconds",
            "Waiting time of requests that were not admitted at once",
            (),
            _SECONDS,
            self.registry,
        )
        self.waiting = Gauge(
            "ppd_admission_waiting", "Requests that wait for admission", registry=self.registry
        )
        self.refused = Counter(
            "ppd_local_refused",
            "Local turns that a decode worker refused, by its reason",
            ["reason"],
            registry=self.registry,
        )
        kinds = ("route", "reason", "turn")
        self.ttft = Histograms(
            "ppd_ttft_seconds",
            "From the request's arrival to the first event of a stream; turn is 1, 2 or 3+",
            kinds,
            _SECONDS,
            self.registry,
        )
        self.tpot = Histograms(
            "ppd_tpot_seconds",
            "Time per output token after the first one, of a stream",
            kinds,
            _TOKEN_SECONDS,
            self.registry,
        )
        self.e2e = Histograms(
            "ppd_e2e_seconds",
            "From the request's arrival to the end of a successful response",
            kinds,
            _SECONDS,
            self.registry,
        )
        self.itl = Histograms(
            "ppd_itl_seconds",
            "Time between two parts of a stream, as they are sent to the client",
            kinds,
            _TOKEN_SECONDS,
            self.registry,
        )
        self.decision = Histograms(
            "ppd_decision_seconds",
            "Time to look up a conversation and decide its route",
            (),
            (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2),
            self.registry,
        )
        self.output_off = Histograms(
            "ppd_output_prediction_factor",
            "Ratio of predicted and actual reply length, the larger divided by the smaller",
            (),
            (1.1, 1.25, 1.5, 2, 3, 5, 10, 30),
            self.registry,
        )
        self.observed_factor = Gauge(
            "ppd_observed_factor",
            "Estimated ratio of a cell's cost to the table's value (shrinkage)",
            ["cell", "route", "value"],
            registry=self.registry,
        )
        self.qps = Gauge(
            "ppd_qps",
            "Turns a second for each decode worker, in the window that decisions use",
            registry=self.registry,
        )
        self.backlog = Gauge(
            "ppd_worker_backlog_tokens",
            "Tokens sent to a worker to prefill that it has not responded to yet",
            ["role", "worker"],
            registry=self.registry,
        )
        self.cached_predicted = Counter(
            "ppd_cached_tokens_predicted",
            "Tokens of local turns that the decode worker was predicted to have cached",
            registry=self.registry,
        )
        self.cached_actual = Counter(
            "ppd_cached_tokens_actual",
            "Tokens of local turns that the decode worker reported as cached",
            registry=self.registry,
        )
        self.transfer_avoided = Counter(
            "ppd_transfer_tokens_avoided",
            "Prompt tokens of local turns, whose KV was not transferred",
            registry=self.registry,
        )
        self.bytes_avoided = Counts(
            "ppd_transfer_kv_bytes_avoided",
            "KV bytes of local turns' prompt tokens; absent until a worker has reported the bytes "
            "of a token",
            (),
            self.registry,
        )
        self.bytes_sent = Counts(
            "ppd_transfer_kv_bytes",
            "KV bytes that remote turns transferred, estimated from what their decode worker was "
            "predicted to lack; absent until a worker has reported the bytes of a token",
            (),
            self.registry,
        )
        self.decode_s, self.decoded_tokens = 0.0, 0
        self.decoding = Counter(
            "ppd_decode_seconds", "Time in which streams decoded", registry=self.registry
        )
        self.cache_misses = Counter(
            "ppd_cache_mispredictions",
            "Local turns that found fewer tokens cached than predicted",
            registry=self.registry,
        )
        self.resumed = Counter(
            "ppd_streams_resumed",
            "Streams whose decode worker was lost: ok if another worker resumed them",
            ["outcome"],
            registry=self.registry,
        )
        self.prefill_errors = Counter(
            "ppd_prefill_errors",
            "Prefill legs that failed for a reason other than the client's request",
            registry=self.registry,
        )
        self.transfer_errors = Counter(
            "ppd_transfer_errors",
            "KV that did not get from a prefill worker to a decode worker, by the reporting role",
            ["role"],
            registry=self.registry,
        )
        self.kv_evicted = Counter(
            "ppd_kv_evicted_tokens",
            "Tokens of known conversations that workers dropped, by their KV events",
            ["role", "worker"],
            registry=self.registry,
        )
        self.kv_events_missed = Counter(
            "ppd_kv_events_missed",
            "Gaps in the KV events of a worker, and KV events that could not be decoded",
            ["role", "worker"],
            registry=self.registry,
        )
        self.kv_events_connected = Gauge(
            "ppd_kv_events_connected",
            "1 while the router is connected to the KV events of a worker that publishes them",
            ["role", "worker"],
            registry=self.registry,
        )
        self.fallbacks = Gauge(
            "ppd_fallback",
            "Fallbacks in use, 0 if not: decode_fallback (no prefill worker is ready), no_table "
            "(or one without a measured cell), unpatched_workers and kv_events_stopped (workers), "
            "not_shared (problems of the shared store)",
            ["kind"],
            registry=self.registry,
        )
        self.sessions = Gauge(
            "ppd_known_turns", "Finished turns that can be continued", registry=self.registry
        )
        self.in_flight = Gauge(
            "ppd_worker_in_flight", "Legs in flight", ["role", "worker"], registry=self.registry
        )
        self.alive = Gauge(
            "ppd_worker_alive",
            "1 if the worker responds to health checks",
            ["role", "worker"],
            registry=self.registry,
        )
        self.breaker_open = Gauge(
            "ppd_worker_breaker_open",
            "1 while the circuit breaker of a live worker is open",
            ["role", "worker"],
            registry=self.registry,
        )

    def decoded(self, tokens: int, seconds: float) -> None:
        """Add to the tokens of streams after the first one, and to the time that they took."""
        self.decode_s += seconds
        self.decoded_tokens += tokens
        self.decoding.inc(seconds)
