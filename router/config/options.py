"""The router's options: one file and a few flags, checked as a whole before anything starts."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from ppd.contract import Role
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Targets, Weights
from ppd.table_policy import DEFAULT_APPEND_BUDGET, DEFAULT_CORRECTIONS, Correction

from .answer_cache import AnswerCacheConfig
from .kubernetes import Kubernetes
from .limits import AdmissionLimits, RateLimit, Tenant, problems
from .retrieval import RetrievalConfig

TABLE_POLICY = "ppd"


class LogFormat(StrEnum):
    """How log records are written: lines of text, or JSON objects."""

    TEXT = "text"
    JSON = "json"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    prefill, decode, replica: base URLs of the workers, scheme and host only.
    embedding: base URLs of workers that serve an embedding model, for ``/v1/embeddings``.
    policy: ``ppd`` (the table's), or one of ``ppd.policies``.
    table: a decision table; "": the shipped one of the model that is served, if there is one.
    corrections: of the table policy.
    append_budget_tokens: of its ``reservation`` correction, for each decode worker.
    weights, targets: of tenants that ``tenants`` does not name; targets win over weights.
    tenants: by name; without keys of their own, by the name that ``/explain`` shows for theirs.
    rate: of tenants that have no limit of their own.
    decision_log: append every decision and its outcome to this file.
    accept_workers: let workers announce themselves; then none need be given.
    worker_token: a secret that announcements must carry; "": $PPD_WORKER_TOKEN, or none.
    worker_networks: announcements must come from there, and lead there; (): anywhere.
    worker_api_key: what SGLang's ``--api-key`` wants; "": $PPD_WORKER_API_KEY, or none.
    admin_token: what operators must carry; "": $PPD_ADMIN_TOKEN, or none.
    admin_port: all but the API is served there, and only there; None: on ``port`` too. Of
        several processes the next ones have the ports after it.
    admin_host: where ``admin_port`` is; "": ``host``.
    tls_certificate, tls_key: PEM files, for https on ``port`` and ``admin_port``.
    workers_file: a TOML file that lists workers, looked at again and again.
    kubernetes: pods that are workers.
    answer_cache: answers kept for questions that mean the same.
    retrieval: passages from a pool of vectors, put into chats' new turns.
    discovery_interval_s: between two looks at ``workers_file`` and at who waits to join or leave.
    heartbeat_budget_s: an announced worker that has been silent for longer is dropped.
    log_level, log_format: ``debug`` to ``error``; ``text`` or ``json``.
    otlp_endpoint: where a span for every request goes, as ``http://HOST:4318/v1/traces``.
    responses_max_bytes: of what ``previous_response_id`` can name, for session_ttl_s.
    processes: that share the port, each with sessions of its own.
    startup_timeout_s: how long to wait for every worker's handshake.
    connect_timeout_s: per connection to a worker.
    answer_timeout_s: in which a worker's answer must begin.
    idle_timeout_s: an answer that has begun and sends nothing for so long has failed.
    worker_idle_timeout_s: a connection idle for longer is not used again; SGLang closes after 5.
    control_timeout_s: of a handshake, a probe, and what processes on the port ask of each other.
    breaker_failures: so many in a row, and a worker is left alone for breaker_rest_s; 0: never.
    resume_streams: how often a stream may go on elsewhere after its decode worker was lost.
    kv_events: hear those of workers that publish them, for what they have dropped.
    decode_fallback: without prefill worker, whole prompts go to decode workers.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    replica: tuple[str, ...] = ()
    embedding: tuple[str, ...] = ()
    policy: str = TABLE_POLICY
    table: str = ""
    corrections: frozenset[Correction] = DEFAULT_CORRECTIONS
    append_budget_tokens: int = DEFAULT_APPEND_BUDGET
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
    admin_port: int | None = None
    admin_host: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    workers_file: str = ""
    kubernetes: Kubernetes | None = None
    retrieval: RetrievalConfig | None = None
    answer_cache: AnswerCacheConfig | None = None
    discovery_interval_s: float = 2.0
    heartbeat_budget_s: float = 10.0
    host: str = "127.0.0.1"
    port: int = 8000
    max_head_bytes: int = 64 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    max_connections: int = 16_384
    client_request_timeout_s: float = 30.0
    client_idle_timeout_s: float = 75.0
    client_stall_timeout_s: float = 60.0
    client_linger_timeout_s: float = 2.0
    shutdown_delay_s: float = 0.0
    shutdown_grace_s: float = 25.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = LogFormat.TEXT
    otlp_endpoint: str = ""
    processes: int = 1
    responses_max_bytes: int = 256 * 1024 * 1024
    session_capacity: int = 1_000_000
    session_ttl_s: float = 3600.0
    startup_timeout_s: float = 120.0
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 300.0
    idle_timeout_s: float = 600.0
    worker_idle_timeout_s: float = 4.0
    control_timeout_s: float = 5.0
    breaker_failures: int = 5
    breaker_rest_s: float = 10.0
    resume_streams: int = 0
    kv_events: bool = True
    decode_fallback: bool = False
    probe_interval_s: float = 2.0

    def check(self) -> None:
        """Raises:
        ConfigError: listing everything that is wrong.
        """
        if wrong := self.problems():
            raise ConfigError("; ".join(wrong))

    def problems(self) -> list[str]:
        wrong = [*self._worker_problems(), *self._policy_problems()]
        wrong += problems(self.rate, self.tenants, self.admission)
        wrong += self._security_problems()
        if not 0 <= self.port <= 65535:
            wrong.append(f"port must be 0..65535, got {self.port}")
        if self.processes < 1:
            wrong.append(f"processes must be 1 or more, got {self.processes}")
        elif self.processes > 1 and not self.admin_port:
            wrong.append("several processes need an admin_port: the first of as many ports")
        for name in ("breaker_failures", "resume_streams", "shutdown_delay_s"):
            if not getattr(self, name) >= 0:
                wrong.append(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in (
            "append_budget_tokens",
            "heartbeat_budget_s",
            "max_head_bytes",
            "max_body_bytes",
            "max_connections",
            "client_request_timeout_s",
            "client_idle_timeout_s",
            "client_stall_timeout_s",
            "client_linger_timeout_s",
            "shutdown_grace_s",
            "responses_max_bytes",
            "session_capacity",
            "session_ttl_s",
            "startup_timeout_s",
            "connect_timeout_s",
            "answer_timeout_s",
            "idle_timeout_s",
            "worker_idle_timeout_s",
            "control_timeout_s",
            "breaker_rest_s",
            "probe_interval_s",
            "discovery_interval_s",
        ):
            value = getattr(self, name)
            if not value > 0:  # also for NaN
                wrong.append(f"{name} must be above 0, got {value}")
        return wrong

    @property
    def operators_host(self) -> str:
        """Of ``admin_port``."""
        return self.admin_host or self.host

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the workers that the policy cannot do without."""
        return (Role.REPLICA,) if self.policy == "replica" else (Role.PREFILL, Role.DECODE)

    @property
    def all_roles(self) -> tuple[Role, ...]:
        """Of those that it uses if there are any."""
        return self.roles if self.policy == "replica" else tuple(Role)

    def _worker_problems(self) -> list[str]:
        wrong: list[str] = []
        for role in Role:
            urls: tuple[str, ...] = getattr(self, role)
            if role in self.roles and not urls and not self._may_come(role):
                wrong.append(
                    f"at least one --{role} URL is needed with policy {self.policy}, or "
                    "--accept-workers, workers_file or [kubernetes]"
                )
            if role not in self.all_roles and urls:
                wrong.append(f"policy {self.policy} uses no --{role} workers")
            wrong += [problem for url in urls if (problem := url_problem(role, url))]
        wrong += [found for url in self.embedding if (found := url_problem("embedding", url))]
        given = [*self.prefill, *self.decode, *self.replica]
        for url in sorted({url for url in given if given.count(url) > 1}):
            wrong.append(f"two workers on one URL: {url}")
        if self.kubernetes is not None:
            wrong += self.kubernetes.problems(self.all_roles)
        for part in (self.retrieval, self.answer_cache):
            if part is not None:
                wrong += part.problems()
        return wrong

    def _may_come(self, role: Role) -> bool:
        """Workers of that role may come that are not given here."""
        announced = self.accept_workers and role is not Role.REPLICA  # has no plugin
        pods = self.kubernetes is not None and self.kubernetes.selector(role) != ""
        return announced or pods or self.workers_file != ""

    def _policy_problems(self) -> list[str]:
        wrong: list[str] = []
        if self.policy != TABLE_POLICY:
            try:
                static_policy(self.policy)
            except ConfigError as error:
                wrong.append(str(error))
            if self.table:
                wrong.append(f"policy {self.policy} uses no table")
        everyone = {"": Tenant(self.weights, self.targets)} | self.tenants
        for name, objectives in everyone.items():
            where = f"tenants.{name}: " if name else ""
            wrong += [
                where + problem
                for objective in (objectives.weights, objectives.targets)
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
        if self.admin_port is not None:
            if not 0 <= self.admin_port <= 65535:
                yield f"admin_port must be 0..65535, got {self.admin_port}"
            if self.admin_port and self.admin_port == self.port and not self.admin_host:
                yield f"admin_port is the port: {self.port}"


class Secrets(msgspec.Struct, frozen=True):
    """What the configuration or the environment says; never shown."""

    worker_token: str
    worker_api_key: str
    admin_token: str

    @classmethod
    def of(cls, config: RouterConfig) -> Secrets:
        return cls(
            **{
                name: getattr(config, name) or os.environ.get(f"PPD_{name.upper()}", "")
                for name in cls.__struct_fields__
            }
        )

    def check(self, config: RouterConfig) -> None:
        """
        Raises:
            ConfigError: one would be given away.
        """
        if config.accept_workers and self.worker_api_key and not self.worker_token:
            raise ConfigError(
                "worker_api_key would go to whoever announces a worker: set worker_token"
            )


def url_problem(role: str, url: str) -> str | None:
    shown = re.sub(r"//[^/]*@", "//", url)  # without what may be a password
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"--{role} {shown!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return f"--{role} must be http://HOST:PORT, got {shown!r}"
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        return f"--{role} must have no path, query or user, got {shown!r}"
    return None
