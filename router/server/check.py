"""``--check-config``: every problem that a start would detect, except those of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ppd.errors import ConfigError, PpdError
from ppd.extras import install

from ..config.options import RouterConfig, Secrets
from ..config.table_files import read_table
from ..workers.workers_file import WorkersFile
from .listening import tls_of


def check_everything(config: RouterConfig) -> None:
    """Check a configuration and the files that it names.

    Raises:
        ConfigError: listing everything that is wrong.
    """
    wrong: list[str] = []
    for check in _checks(config):
        try:
            check()
        except PpdError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("; ".join(wrong))


def _checks(config: RouterConfig) -> Iterator[Callable[[], object]]:
    yield config.check
    yield lambda: Secrets.of(config).check(config)
    yield lambda: tls_of(config)
    for given in {config.table, *(model.table for model in config.models.values())} - {""}:
        yield partial(read_table, Path(given))
    if config.workers_file:
        roles, interval_s = config.all_roles, config.discovery_interval_s
        yield lambda: WorkersFile(config.workers_file, roles, interval_s)
    if config.decision_log:
        yield lambda: _require_writable(Path(config.decision_log))
    if config.otlp_endpoint:
        yield lambda: _require("opentelemetry.sdk", "otlp_endpoint", "otel")
    if config.kubernetes is not None:
        yield lambda: _require("kubernetes_asyncio", "kubernetes", "k8s")
    if config.gateway is not None:
        yield lambda: _require("grpc", "gateway", "gateway")
        yield lambda: _require("envoy_data_plane", "gateway", "gateway")
    if config.retrieval is not None and config.retrieval.milvus is not None:
        yield lambda: _require("pymilvus", "retrieval.milvus", "milvus")
    if (shared := config.shared) is not None:
        yield lambda: _require("redis.asyncio", "shared", "shared")
        yield lambda: shared.secret
        if shared.responses:
            yield shared.encryption_key


def _require_writable(log: Path) -> None:
    if not os.access(log if log.exists() else log.parent, os.W_OK):
        raise ConfigError(f"decision_log: {log} cannot be written")


def _require(module: str, option: str, extra: str) -> None:
    try:
        installed = find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        installed = False
    if not installed:
        raise ConfigError(f"{option} needs more packages: {install(extra)}")
