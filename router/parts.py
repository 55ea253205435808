"""The router's parts, put together around its workers."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.decision import Policy
from ppd.forecast import Forecast
from ppd.journal import VERSION as JOURNAL_VERSION
from ppd.journal import Opened
from ppd.judge import Judge
from ppd.sessions import SessionIndex

from .admin import Admin
from .admission import Admission
from .config import RouterConfig, Secrets
from .dispatch import Dispatcher
from .journal import Journal
from .keys import KeyRing
from .ledger import Ledger
from .metrics import Metrics
from .operations import Operations
from .rates import Rates
from .tables import TableFile
from .turns import TurnServer
from .wire.client import Upstreams
from .wishes import WishBook
from .workers import WorkerPool


def open_journal(config: RouterConfig, table: TableFile | None) -> Journal:
    opened = Opened(
        version=JOURNAL_VERSION,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=config.policy,
        corrections=tuple(sorted(config.corrections)),
        append_budget_tokens=config.append_budget_tokens,
        table=table.digest if table else "",
    )
    return Journal(config.decision_log, opened)


@dataclass(frozen=True, slots=True)
class Parts:
    """What clients and operators talk to."""

    turns: TurnServer
    admin: Admin
    operations: Operations


def make_parts(
    config: RouterConfig,
    policy: Policy,
    table: TableFile | None,
    pool: WorkerPool,
    journal: Journal,
    upstreams: Upstreams,
    secrets: Secrets,
) -> Parts:
    clock = time.monotonic
    metrics, arrivals, backlog, forecast = Metrics(), ArrivalRate(), Backlog(), Forecast()
    index = SessionIndex(capacity=config.session_capacity, ttl_s=config.session_ttl_s)
    keys = KeyRing(config.tenants, secrets.worker_api_key)
    admission = Admission(config.admission, pool.has_room, metrics, clock)
    pool.changed = admission.look
    turns = TurnServer(
        pool=pool,
        judge=Judge(
            policy=policy,
            cluster=pool,
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
        ),
        arrivals=arrivals,
        wishes=WishBook(config),
        dispatcher=Dispatcher(
            upstreams=upstreams,
            pool=pool,
            backlog=backlog,
            metrics=metrics,
            clock=clock,
            new_room=lambda: random.getrandbits(63),
            escapes=config.escape_to_decode,
        ),
        ledger=Ledger(
            index=index,
            policy=policy,
            forecast=forecast,
            journal=journal,
            metrics=metrics,
            clock=clock,
            new_session=lambda: f"{random.getrandbits(48):012x}",
        ),
        journal=journal,
        metrics=metrics,
        keys=keys,
        rates=Rates(config.rate, config.tenants, named=keys.closed, metrics=metrics, clock=clock),
        admission=admission,
        most_resumptions=config.resume_streams,
        clock=clock,
    )
    admin = Admin(
        policy_spec=config.policy,
        roles=frozenset(config.roles),
        policy=policy,
        table=table,
        pool=pool,
        turns=turns,
        index=index,
        arrivals=arrivals,
        backlog=backlog,
        forecast=forecast,
        admission=admission,
        journal=journal,
        metrics=metrics,
        clock=clock,
    )
    return Parts(turns, admin, Operations(pool, config.roles))
