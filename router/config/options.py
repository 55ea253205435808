"""The router's options, which are checked together before anything starts."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from ppd.choice import PlacementRule
from ppd.contract import Role
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Targets, Weights
from ppd.table_policy import DEFAULT_APPEND_BUDGET, DEFAULT_CORRECTIONS, Correction

from .answer_cache import AnswerCacheConfig
from .gateway import GatewayConfig
from .kubernetes import Kubernetes
from .limits import AdmissionLimits, RateLimit, Tenant, problems
from .models import ModelOptions, model_problems
from .ranges import (
    CountFromOne,
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    PositiveInt,
    Share,
    range_problems,
)
from .retrieval import RetrievalConfig
from .shared import SharedConfig

TABLE_POLICY = "ppd"


class LogFormat(StrEnum):
    """The format of log records: lines of text, or JSON objects."""

    TEXT = "text"
    JSON = "json"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a router process.

    Attributes:
        prefill: base URLs of the prefill workers: scheme, host and port.
        decode: base URLs of the decode workers.
        replica: base URLs of workers that do both.
        embedding: base URLs of workers that serve an embedding model, for ``/v1/embeddings``,
            ``/v1/rerank``, ``/v1/score`` and ``/classify``.
        models: the served models by name; empty: one, that of the first worker.
        policy: ``ppd`` (the table policy), or one of ``ppd.policies``.
        table: path of a decision table; "": the shipped table of the served model, if any.
        shipped_tables: whether a table that comes with the package may be used: one of the served
            model whose GPU, tensor parallelism, link and shape of cluster are those of the workers.
        corrections: the corrections that the table policy applies.
        placement: the choice of a new conversation's workers: ``load`` (queued prefill tokens, KV
            in use, shared prefixes) or ``hash`` (of the conversation, with bounded load).
        append_budget_tokens: budget of the ``reservation`` correction, for each decode worker.
        weights: default weights of tenants.
        targets: default targets of tenants; they take precedence over weights.
        tenants: objective, keys and rate of tenants, by name. A tenant without ``keys`` has the
            name that ``/explain`` shows for it.
        rate: default rate limit of tenants.
        admission: limits on requests in flight and waiting, of each model.
        decision_log: path of the file that every decision and its outcome is appended to; "":
            none.
        accept_workers: workers may announce themselves; then none need be configured.
        worker_token: secret that announcements must carry; "": $PPD_WORKER_TOKEN, or none.
        worker_networks: networks that announcements and the URLs in them must belong to; empty:
            any.
        worker_api_key: SGLang's ``--api-key``; "": $PPD_WORKER_API_KEY, or none.
        admin_token: bearer token of operators; "": $PPD_ADMIN_TOKEN, or none.
        admin_port: port of everything but the API; None: ``port``. Of several processes each
            further one uses the next port.
        admin_host: address of ``admin_port``; "": ``host``.
        tls_certificate: PEM file of the certificate, for https on ``port`` and ``admin_port``.
        tls_key: PEM file of the certificate's key.
        workers_file: path of a TOML file that lists workers; it is read periodically.
        kubernetes: pods of a Kubernetes cluster that are workers.
        retrieval: passages from a vector pool that are added to chats' new turns.
        answer_cache: answers stored for questions with the same meaning.
        gateway: a gRPC service that decides where a gateway sends requests.
        shared: a store that several routers share.
        discovery_interval_s: interval of reading ``workers_file``, and of retrying workers that
            are to join or leave.
        heartbeat_budget_s: an announced worker is dropped after so long without an announcement.
        host: address of the API.
        port: port of the API; 0 is any free port.
        max_head_bytes: maximum size of a request's head.
        max_body_bytes: maximum size of a request's body.
        max_connections: maximum number of clients' connections.
        client_request_timeout_s: limit on the arrival of a request's head, and on each pause in
            the arrival of its body.
        client_idle_timeout_s: an idle connection is closed after so long.
        client_stall_timeout_s: a client that accepts no data for so long is disconnected.
        client_linger_timeout_s: time for a client to read a last response before its connection is
            closed.
        shutdown_delay_s: at a stop, time that requests are still accepted while ``/health`` is 503.
        shutdown_grace_s: time for requests in flight to end at a stop.
        log_level: lowest level of log records that are written.
        log_format: lines of text, or JSON objects.
        otlp_endpoint: URL for the spans of requests, as ``http://HOST:4318/v1/traces``; "": no
            tracing.
        trace_share: share of the requests with a span, of those without a ``traceparent``.
        processes: router processes that share the port, each with sessions of its own.
        responses_max_bytes: total size of the responses that ``previous_response_id`` can name,
            each for ``session_ttl_s``.
        session_capacity: maximum number of known turns.
        session_ttl_s: lifetime of an unused session.
        startup_timeout_s: limit on the handshakes of all workers.
        connect_timeout_s: limit on a connection to a worker.
        answer_timeout_s: limit on the first byte of a worker's response.
        idle_timeout_s: a started response fails after so long without data.
        worker_idle_timeout_s: a connection idle for longer is not reused. SGLang closes idle
            connections after 5 s.
        control_timeout_s: limit on a handshake, a probe, and a request to another router process.
        breaker_failures: failures in a row that open a worker's circuit breaker for
            ``breaker_open_s``; 0: it never opens.
        breaker_open_s: time that a circuit breaker stays open.
        resume_streams: maximum number of resumptions of a stream after the loss of its decode
            worker.
        kv_events: subscribe to the KV events of workers that publish them.
        decode_fallback: without a prefill worker, decode workers serve whole prompts.
        probe_interval_s: interval of the workers' health checks.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    replica: tuple[str, ...] = ()
    embedding: tuple[str, ...] = ()
    models: dict[str, ModelOptions] = {}
    policy: str = TABLE_POLICY
    table: str = ""
    shipped_tables: bool = True
    corrections: frozenset[Correction] = DEFAULT_CORRECTIONS
    placement: PlacementRule = PlacementRule.LOAD
    append_budget_tokens: PositiveInt = DEFAULT_APPEND_BUDGET
    weights: Weights = Weights()
    targets: Targets | None = None
    tenants: dict[str, Tenant] = {}
    rate: RateLimit = RateLimit()
    admission: AdmissionLimits = AdmissionLimits()
    decision_log: str = ""
    accept_workers: bool = False
    worker_token: str = ""
    worker_networks: tuple[str, ...] = ()
    worker_api_key: str = ""
    admin_token: str = ""
    admin_port: Port | None = None
    admin_host: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    workers_file: str = ""
    kubernetes: Kubernetes | None = None
    retrieval: RetrievalConfig | None = None
    answer_cache: AnswerCacheConfig | None = None
    gateway: GatewayConfig | None = None
    shared: SharedConfig | None = None
    discovery_interval_s: Positive = 2.0
    heartbeat_budget_s: Positive = 10.0
    host: str = "127.0.0.1"
    port: Port = 8000
    max_head_bytes: PositiveInt = 64 * 1024
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    max_connections: PositiveInt = 16_384
    client_request_timeout_s: Positive = 30.0
    client_idle_timeout_s: Positive = 75.0
    client_stall_timeout_s: Positive = 60.0
    client_linger_timeout_s: Positive = 2.0
    shutdown_delay_s: NonNegative = 0.0
    shutdown_grace_s: Positive = 25.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = LogFormat.TEXT
    otlp_endpoint: str = ""
    trace_share: Share = 1.0
    processes: CountFromOne = 1
    responses_max_bytes: PositiveInt = 256 * 1024 * 1024
    session_capacity: PositiveInt = 1_000_000
    session_ttl_s: Positive = 3600.0
    startup_timeout_s: Positive = 120.0
    connect_timeout_s: Positive = 5.0
    answer_timeout_s: Positive = 300.0
    idle_timeout_s: Positive = 600.0
    worker_idle_timeout_s: Positive = 4.0
    control_timeout_s: Positive = 5.0
    breaker_failures: NonNegativeInt = 5
    breaker_open_s: Positive = 10.0
    resume_streams: NonNegativeInt = 0
    kv_events: bool = True
    decode_fallback: bool = False
    probe_interval_s: Positive = 2.0

    def check(self) -> None:
        """Check all options together.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        if wrong := self.problems():
            raise ConfigError("; ".join(wrong))

    def problems(self) -> list[str]:
        """Return a message for each option that is wrong."""
        wrong = [*self._worker_problems(), *self._policy_problems()]
        wrong += problems(self.rate, self.tenants, self.admission)
        wrong += self._security_problems()
        if self.processes > 1 and not self.admin_port:
            wrong.append("several processes need an admin_port: the first of as many ports")
        wrong += range_problems(self)
        return wrong

    @property
    def operators_host(self) -> str:
        """The address that ``admin_port`` listens on."""
        return self.admin_host or self.host

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the policy requires workers for."""
        return (Role.REPLICA,) if self.policy == "replica" else (Role.PREFILL, Role.DECODE)

    @property
    def needed_roles(self) -> tuple[Role, ...]:
        """Those of which the router waits for a worker before it serves."""
        alone = self.decode_fallback and Role.DECODE in self.roles
        return (Role.DECODE,) if alone else self.roles

    @property
    def all_roles(self) -> tuple[Role, ...]:
        """The roles whose workers the policy uses, required or not."""
        return self.roles if self.policy == "replica" else tuple(Role)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The configured models that prefill, decode or replica workers serve."""
        return tuple(name for name, model in self.models.items() if model.generates)

    @property
    def encoders(self) -> dict[str, tuple[str, ...]]:
        """The URLs of the workers of each model that only embeds, ranks, scores or classifies."""
        models = self.models.items()
        return {name: model.embedding for name, model in models if not model.generates}

    def table_of(self, model: str) -> str:
        """The path of a model's decision table; "": the shipped one, if any."""
        options = self.models.get(model)
        return self.table if options is None else options.table or self.table

    def admission_of(self, model: str) -> AdmissionLimits:
        """The limits on a model's requests."""
        options = self.models.get(model)
        own = None if options is None else options.admission
        return self.admission if own is None else own

    def _worker_problems(self) -> list[str]:
        wrong: list[str] = []
        for role in Role:
            urls: tuple[str, ...] = getattr(self, role)
            if role in self.roles and not urls and not self._can_be_discovered(role):
                announced = "" if role is Role.REPLICA else "--accept-workers, "
                wrong.append(
                    f"at least one --{role} URL is needed with policy {self.policy}, or "
                    f"{announced}workers_file or [kubernetes]"
                )
            if role not in self.all_roles and urls:
                wrong.append(f"policy {self.policy} uses no --{role} workers")
            wrong += [problem for url in urls if (problem := url_problem(role, url))]
        encoders = [*self.embedding, *(url for urls in self.encoders.values() for url in urls)]
        wrong += [problem for url in encoders if (problem := url_problem("embedding", url))]
        wrong += model_problems(self.models)
        if len(self.model_names) > 1:
            for name in ("table", "embedding"):
                if getattr(self, name):
                    wrong.append(
                        f"{name} is of one model: give models.NAME.{name} for each of them"
                    )
        given = [*self.prefill, *self.decode, *self.replica]
        for url in sorted({url for url in given if given.count(url) > 1}):
            wrong.append(f"two workers on one URL: {url}")
        if self.kubernetes is not None:
            wrong += self.kubernetes.problems(self.all_roles)
        for part in (self.retrieval, self.answer_cache, self.gateway, self.shared):
            if part is not None:
                wrong += part.problems()
        if self.retrieval is not None and self.answer_cache is not None:
            private = self.answer_cache.collection
            if private in self.retrieval.default_collections():
                wrong.append(f"retrieval: a default searches the answer cache's {private!r}")
        if self.gateway is not None and self.gateway.port == 0 and self.processes > 1:
            wrong.append("gateway.port must be given: several processes share it")
        return wrong

    def _can_be_discovered(self, role: Role) -> bool:
        """Return whether workers of a role may join that the options do not list."""
        announced = self.accept_workers and role is not Role.REPLICA  # replicas have no plugin
        pods = self.kubernetes is not None and self.kubernetes.selector(role) != ""
        return announced or pods or self.workers_file != ""

    def _policy_problems(self) -> list[str]:
        wrong: list[str] = []
        if self.policy != TABLE_POLICY:
            try:
                static_policy(self.policy)
            except ConfigError as error:
                wrong.append(str(error))
        owners = {"": Tenant(self.weights, self.targets)} | self.tenants
        for name, owner in owners.items():
            where = f"tenants.{name}: " if name else ""
            wrong += [
                where + problem
                for objective in (owner.weights, owner.targets)
                if objective is not None and (problem := objective.problem())
            ]
        return wrong

    def _security_problems(self) -> Iterator[str]:
        for network in self.worker_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                yield f"worker_networks: {error}"
        if bool(self.tls_certificate) != bool(self.tls_key):
            yield "tls_certificate and tls_key belong together"
        if self.admin_host and self.admin_port is None:
            yield "admin_host is of an admin_port, and there is none"
        if self.admin_port and self.admin_port == self.port and not self.admin_host:
            yield f"admin_port is the port: {self.port}"


class Secrets(msgspec.Struct, frozen=True):
    """Secrets from the configuration, or else from the environment; they are never shown.

    Attributes:
        worker_token: the secret that announcements must carry; "": none.
        worker_api_key: the key of requests to workers; "": none.
        admin_token: the token that operators must carry; "": none.
    """

    worker_token: str
    worker_api_key: str
    admin_token: str

    @classmethod
    def of(cls, config: RouterConfig) -> Secrets:
        """Return the configuration's secrets; for an empty one, its environment variable."""
        return cls(
            **{
                name: getattr(config, name) or os.environ.get(f"PPD_{name.upper()}", "")
                for name in cls.__struct_fields__
            }
        )

    def check(self, config: RouterConfig) -> None:
        """Check that no secret would be sent to an unauthenticated worker.

        Raises:
            ConfigError: one would be.
        """
        if config.accept_workers and self.worker_api_key and not self.worker_token:
            raise ConfigError(
                "worker_api_key would be sent to every announced worker: set worker_token"
            )


def url_problem(role: str, url: str) -> str | None:
    """Return why ``url`` is no worker's base URL, or None.

    Args:
        role: of the worker, for the message.
        url: to be checked.
    """
    shown = re.sub(r"//[^/]*@", "//", url)  # the part removed may be a password
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as a look-up of the address does
    except ValueError as error:
        return f"--{role} {shown!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return f"--{role} must be http://HOST:PORT, got {shown!r}"
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        return f"--{role} must have no path, query or user, got {shown!r}"
    return None
