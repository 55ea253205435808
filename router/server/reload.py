"""Reload of a changed configuration while requests are served.

Options that sockets, connections or workers were created with change only by a restart.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from ppd.errors import PpdError
from ppd.planning import Planner

from ..admin.admin import Admin
from ..config.options import RouterConfig, Secrets
from ..config.tables import make_policy
from ..intake.admission import Admission
from ..intake.keys import KeyRing
from ..intake.objectives import Objectives
from ..observability.journal import Journal, opened_by
from ..serving.handler import RequestHandler
from ..workers.registry import WorkerRegistry
from .listening import tls_of, trust_certificate

logger = logging.getLogger("ppd.router")

_TLS = ("tls_certificate", "tls_key")
_POLICY = ("policy", "table", "corrections", "append_budget_tokens")
_TENANTS = ("weights", "targets", "tenants", "rate")
RELOADABLE = (*_POLICY, *_TENANTS, *_TLS, "admission", "resume_streams")


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
    admission: Admission
    planner: Planner
    admin: Admin
    journal: Journal
    tls: ssl.SSLContext | None = None
    trusted: ssl.SSLContext | None = None

    def reload(self, read: Callable[[], RouterConfig]) -> None:
        """Apply the configuration that ``read`` returns, or nothing of it if it has a fault."""
        try:
            new = read()
            new.check()
            self._apply(new)
        except PpdError as error:
            logger.error("configuration not reloaded: %s", error)

    def _apply(self, new: RouterConfig) -> None:
        old = self.config
        names = [name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)]
        later = [name for name in names if name not in RELOADABLE]
        if new.roles != old.roles:
            raise PpdError(f"policy {new.policy} uses other workers than {old.policy}: restart")
        if (tls_of(new) is None) is not (self.tls is None):
            raise PpdError("tls_certificate: with TLS or without is for a restart")
        policy, table = make_policy(new, self.registry.models, self.registry.shape)
        current = self.admin.table
        if any(name in _POLICY for name in names) or (table and table.digest) != (
            current and current.digest
        ):
            self.journal.opened(opened_by(new, table))
            self.planner.replace_policy(policy, since=self.journal.next_number())
            self.admin.set_policy(new.policy, table)
        keys = KeyRing(new.tenants, self.secrets.worker_api_key)
        self.handler.reload(keys, Objectives(new), new.resume_streams)
        self.handler.rates.reload(new.rate, new.tenants, named=keys.closed)
        self.admission.limits = new.admission
        self.admission.admit_next()
        if self.tls is not None:  # the files may have new content
            self.tls.load_cert_chain(new.tls_certificate, new.tls_key)
        if self.trusted is not None:
            trust_certificate(self.trusted, new)
        self.config = new
        applied = [name for name in names if name in RELOADABLE]
        logger.info("configuration reloaded: %s", ", ".join(applied) or "nothing in it has changed")
        if later:
            logger.warning("only a restart takes up: %s", ", ".join(later))
