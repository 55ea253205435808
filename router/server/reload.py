"""Reload of a changed configuration while requests are served.

Options that sockets, connections or workers were created with change only by a restart.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.errors import PpdError, TableError

from ..admin.admin import Admin
from ..config.options import TABLE_POLICY, RouterConfig, Secrets
from ..config.table_files import read_table
from ..config.tables import find_table, make_policy
from ..intake.keys import KeyRing
from ..intake.objectives import Objectives
from ..observability.journal import Journal, digests, opened_by
from ..serving.handler import RequestHandler
from ..serving.model import ServedModel
from ..workers.registry import WorkerRegistry
from .listening import tls_of, trust_certificate
from .models import Policies, make_policies, tables_of

logger = logging.getLogger("ppd.router")

_TLS = ("tls_certificate", "tls_key")
_POLICY = ("policy", "table", "shipped_tables", "corrections", "append_budget_tokens")
_TENANTS = ("weights", "targets", "tenants", "rate")
RELOADABLE = (*_POLICY, *_TENANTS, *_TLS, "models", "admission", "resume_streams")


def reloaded(old: RouterConfig, new: RouterConfig) -> RouterConfig:
    """Return ``old`` with the options of ``new`` that change without a restart.

    Raises:
        PpdError: the new configuration is wrong, names a file that cannot be read, or needs a
            restart.
    """
    new.check()
    if new.roles != old.roles:
        raise PpdError(f"policy {new.policy} uses other workers than {old.policy}: restart")
    if (tls_of(new) is None) is bool(old.tls_certificate):
        raise PpdError("tls_certificate: with TLS or without is for a restart")
    if (new.model_names, new.encoders) != (old.model_names, old.encoders):
        raise PpdError("models: other models, or other embedding workers, are for a restart")
    if new.policy == TABLE_POLICY:
        for path in {new.table_of(name) for name in new.model_names or ("",)} - {""}:
            read_table(Path(path))
    taken_up = {name: getattr(new, name) for name in RELOADABLE}
    return msgspec.structs.replace(old, **taken_up)


@dataclass(slots=True)
class Reloader:
    """Applies a changed configuration to the router's components.

    Attributes:
        config: the one in force.
        tls: for new connections of clients; None: http, until a restart.
        trusted: for requests to peers by https; None: http.
    """

    config: RouterConfig
    secrets: Secrets
    registry: WorkerRegistry
    handler: RequestHandler
    models: Mapping[str, ServedModel]
    admin: Admin
    journal: Journal
    tls: ssl.SSLContext | None = None
    trusted: ssl.SSLContext | None = None

    def reload(self, read: Callable[[], RouterConfig]) -> None:
        """Apply the configuration that ``read`` returns, or nothing of it if it has a fault."""
        try:
            new = read()
            reloaded(self.config, new)
            self._apply(new)
        except PpdError as error:
            logger.error("configuration not reloaded: %s", error)

    def _apply(self, new: RouterConfig) -> None:
        old = self.config
        names = [name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)]
        later = [name for name in names if name not in RELOADABLE]
        policies = make_policies(new, self.registry)
        changed = digests(tables_of(policies)) != self._digests()
        if changed or any(name in _POLICY for name in names):
            self._take_up(new, policies)
            self.admin.policy_spec = new.policy
        keys = KeyRing(new.tenants, self.secrets.worker_api_key)
        self.handler.reload(keys, Objectives(new), new.resume_streams)
        self.handler.rates.reload(new.rate, new.tenants, named=keys.closed)
        for name, model in self.models.items():
            model.admission.limits = new.admission_of(name)
            model.admission.admit_next()
        if self.tls is not None:  # the files may have new content
            self.tls.load_cert_chain(new.tls_certificate, new.tls_key)
        if self.trusted is not None:
            trust_certificate(self.trusted, new)
        self.config = new
        applied = [name for name in names if name in RELOADABLE]
        logger.info("configuration reloaded: %s", ", ".join(applied) or "nothing in it has changed")
        if later:
            logger.warning("only a restart takes up: %s", ", ".join(later))

    def choose_table(self, model: ServedModel) -> None:
        """Take up the shipped table that holds for a model's workers now, or none.

        Without one that is given, a router chooses again when workers join or leave.
        """
        workers, config = model.workers, self.config
        if config.policy != TABLE_POLICY or config.table_of(workers.models[0]):
            return
        of = (config, workers.models, workers.shape, workers.machines)
        try:
            if digests({model.name: find_table(*of)}) != digests({model.name: model.table}):
                self._take_up(config, {model.name: make_policy(*of)}, model.name)
        except TableError as error:
            logger.error("the decision table stays as it is: %s", error)

    def _take_up(self, config: RouterConfig, policies: Policies, model: str = "") -> None:
        """Decide by other policies from the next request on; ``model``: of one model alone."""
        tables = {name: model.table for name, model in self.models.items()} | tables_of(policies)
        self.journal.opened(opened_by(config, tables, model))
        since = self.journal.next_number()
        for name, (policy, table) in policies.items():
            self.models[name].planner.replace_policy(policy, since=since)
            self.models[name].table = table

    def _digests(self) -> dict[str, str]:
        return digests({name: model.table for name, model in self.models.items()})
