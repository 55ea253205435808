"""What the router does without at present, and works on: counted, shown and logged.

Each fallback keeps requests going, at a cost that no request shows. This module only looks at the
state of the workers. It changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from ppd.contract import Role

from ..config.options import TABLE_POLICY
from ..config.table_files import TableFile
from ..config.tables import is_empty
from .group import ModelWorkers
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

_BEGINS = "no prefill worker is ready: decode workers prefill whole prompts (decode_fallback)"
_ENDS = "decode workers no longer prefill whole prompts (decode_fallback)"

_REMOTE_POLICY = "pd"  # the policy that needs no plugin


class Fallback(StrEnum):
    """A fallback, as its metric and the dashboard name it."""

    DECODE_FALLBACK = "decode_fallback"  # no prefill worker is ready
    NO_TABLE = "no_table"  # none, or one without a measured cell
    UNPATCHED = "unpatched_workers"
    KV_EVENTS_STOPPED = "kv_events_stopped"
    NOT_SHARED = "not_shared"  # the shared store has a problem


class Fallbacks:
    """Counts the fallbacks that are active.

    The log has one line when each begins. Those of tables, plugins, KV events and the shared store
    are written where they are found; this class writes that of ``decode_fallback``.

    Args:
        workers: of one model.
        shown: the model's name where there are several, else "".
        decode_fallback: without a prefill worker, decode workers prefill whole prompts.
        kv_events: the router subscribes to KV events.
        store_problems: returns the number of problems of the shared store.
    """

    def __init__(
        self,
        workers: ModelWorkers,
        *,
        decode_fallback: bool,
        kv_events: bool,
        shown: str = "",
        store_problems: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store_problems = store_problems
        self._workers = workers
        self._of = f", model {shown}" if shown else ""
        self._decode_fallback = decode_fallback
        self._kv_events = kv_events
        self._logged = False

    def counts(self, policy: str, table: TableFile | None) -> dict[Fallback, int]:
        """Return the number of workers or parts that each fallback stands in for; 0: not active.

        Args:
            policy: name of the policy in force.
            table: its decision table.
        """
        workers = [worker for worker in self._workers.workers if worker.alive]
        decode = [worker for worker in workers if worker.role is Role.DECODE]
        needs_plugin = policy != _REMOTE_POLICY or self._decode_fallback
        return {
            Fallback.DECODE_FALLBACK: int(self.decode_workers_prefill),
            Fallback.NO_TABLE: int(policy == TABLE_POLICY and is_empty(table)),
            Fallback.UNPATCHED: needs_plugin * sum(not w.takes_appends for w in decode),
            Fallback.KV_EVENTS_STOPPED: sum(map(self.lacks_kv_events, workers)),
            Fallback.NOT_SHARED: self._store_problems(),
        }

    @property
    def decode_workers_prefill(self) -> bool:
        """Whether decode workers prefill whole prompts, for want of another worker that could."""
        if not self._decode_fallback:
            return False
        ready = self._workers.ready
        able = any(worker.takes_appends for worker in ready(Role.DECODE))
        return able and not ready(Role.PREFILL) and not ready(Role.REPLICA)

    @property
    def decode_workers_could(self) -> bool:
        """Whether a live decode worker could prefill whole prompts, so that no other is needed."""
        alive = (worker for worker in self._workers.of(Role.DECODE) if worker.alive)
        return self._decode_fallback and any(worker.takes_appends for worker in alive)

    def lacks_kv_events(self, worker: Worker) -> bool:
        """Return whether a worker publishes KV events that the router uses, and none arrive."""
        handshake = worker.handshake
        follows = self._kv_events and handshake.publisher is not None
        return follows and not handshake.keeps_sessions and worker.publishes is not True

    def check(self) -> None:
        """Log the beginning and the end of ``decode_fallback``, once each."""
        active = self.decode_workers_prefill
        if active and not self._logged:
            logger.error("%s%s", _BEGINS, self._of)
        elif self._logged and not active:
            logger.info("%s%s", _ENDS, self._of)
        self._logged = active

    async def watch_forever(self, interval_s: float) -> None:
        """Check again and again.

        Args:
            interval_s: seconds between two checks.
        """
        while True:
            self.check()
            await asyncio.sleep(interval_s)
