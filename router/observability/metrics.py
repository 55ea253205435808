"""What the router counts, in Prometheus' form. Label values are the words of ``ppd.decision``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from .counting import Counts, Histograms

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


def turn_label(number: int) -> str:
    return str(number) if number < 3 else "3+"


class Metrics:
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
            "Of requests that had to wait before they were let in",
            (),
            _SECONDS,
            self.registry,
        )
        self.waiting = Gauge(
            "ppd_admission_waiting", "Requests that wait to be let in", registry=self.registry
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
            "From the request's arrival to the first event (streaming) or the answer; turn is 1, "
            "2 or 3+",
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
            "From the request's arrival to the end of a good answer",
            kinds,
            _SECONDS,
            self.registry,
        )
        self.itl = Histograms(
            "ppd_itl_seconds",
            "Between two parts of a stream, as they are passed on",
            kinds,
            _TOKEN_SECONDS,
            self.registry,
        )
        self.decision = Histograms(
            "ppd_decision_seconds",
            "Time to look a conversation up and decide its route",
            (),
            (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2),
            self.registry,
        )
        self.output_off = Histograms(
            "ppd_output_prediction_factor",
            "Predicted reply length against the actual one, the larger through the smaller",
            (),
            (1.1, 1.25, 1.5, 2, 3, 5, 10, 30),
            self.registry,
        )
        self.observed_factor = Gauge(
            "ppd_observed_factor",
            "By which factor a cell's cost is taken to differ from the table (shrinkage)",
            ["cell", "route", "value"],
            registry=self.registry,
        )
        self.qps = Gauge(
            "ppd_qps",
            "Turns a second for each decode worker, in the window that decisions see",
            registry=self.registry,
        )
        self.backlog = Gauge(
            "ppd_worker_backlog_tokens",
            "Tokens sent to a worker to prefill and not answered yet",
            ["role", "worker"],
            registry=self.registry,
        )
        self.cached_predicted = Counter(
            "ppd_cached_tokens_predicted",
            "Tokens of local turns that the decode worker was believed to hold",
            registry=self.registry,
        )
        self.cached_actual = Counter(
            "ppd_cached_tokens_actual",
            "Tokens of local turns that the decode worker reported as cached",
            registry=self.registry,
        )
        self.transfer_avoided = Counter(
            "ppd_transfer_tokens_avoided",
            "Prompt tokens of local turns: their KV did not go over the network",
            registry=self.registry,
        )
        self.bytes_avoided = Counts(
            "ppd_transfer_kv_bytes_avoided",
            "Their KV in bytes, of turns on workers that tell how much a token's is; absent until "
            "there is one",
            (),
            self.registry,
        )
        self.bytes_sent = Counts(
            "ppd_transfer_kv_bytes",
            "KV that remote turns sent, by what their decode worker was believed to lack; absent "
            "until a worker tells how much a token's is",
            (),
            self.registry,
        )
        self.decode_s = 0.0
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
            "Streams whose decode worker was lost: ok if another one went on with them",
            ["outcome"],
            registry=self.registry,
        )
        self.prefill_errors = Counter(
            "ppd_prefill_errors",
            "Prefill legs that failed by no fault of the client",
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
            "Times that KV events of a worker were missed, or could not be read",
            ["role", "worker"],
            registry=self.registry,
        )
        self.kv_events_connected = Gauge(
            "ppd_kv_events_connected",
            "1 while the KV events of a worker that publishes them are heard",
            ["role", "worker"],
            registry=self.registry,
        )
        self.sessions = Gauge(
            "ppd_known_turns", "Finished turns that can be continued", registry=self.registry
        )
        self.in_flight = Gauge(
            "ppd_worker_in_flight", "Legs under way", ["role", "worker"], registry=self.registry
        )
        self.alive = Gauge(
            "ppd_worker_alive",
            "1 if the worker answers",
            ["role", "worker"],
            registry=self.registry,
        )
        self.breaker_open = Gauge(
            "ppd_worker_breaker_open",
            "1 if the worker lives but fails its requests, and is left alone for a while",
            ["role", "worker"],
            registry=self.registry,
        )

    def decoded_for(self, seconds: float) -> None:
        self.decode_s += seconds
        self.decoding.inc(seconds)
