"""Who is left for a turn, after what has failed it: asked between one try and the next."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.contract import Role
from ppd.decision import Decision, Route

from ..workers.registry import WorkerRegistry
from ..workers.worker import Worker
from .context import RequestContext


@dataclass(frozen=True)
class Left:
    """``decode_fallback``: without prefill worker, decode workers prefill whole prompts."""

    pool: WorkerRegistry
    decode_fallback: bool

    def on_replica(self, context: RequestContext) -> bool:
        """Whether a replica takes the turn now: as decided, unless only replicas are left, or only
        the others; then the decision becomes that."""
        decided = context.decision.route is Route.REPLICA
        if not self.pool.of(Role.REPLICA):
            return decided
        replicas, apart = self._any(context, Role.REPLICA), self._apart(context)
        if replicas is apart or replicas is decided:
            return decided
        route = Route.REPLICA if replicas else Route.REMOTE
        context.decision = Decision(route, context.decision.reason)
        return replicas

    def beside(self, context: RequestContext, worker: Worker) -> bool:
        """Whether someone else can do what ``worker`` did not."""
        if self._any(context, worker.role) or self.way_out(context) is not None:
            return True
        if worker.role is Role.REPLICA:
            return self._apart(context)
        return self._any(context, Role.REPLICA)

    def home(self, context: RequestContext, role: Role) -> Worker | None:
        """The conversation's home, if it is of that role and may be given work."""
        home = self.pool.by_identity(context.hit.turn.home) if context.hit else None
        return home if home is not None and home.role is role else None

    def way_out(self, context: RequestContext) -> Worker | None:
        """A decode worker that can prefill the whole prompt, where no prefill worker is left."""
        if (
            not self.decode_fallback
            or context.inbound.chain is None
            or self._any(context, Role.PREFILL)
        ):
            return None
        able = [
            worker
            for worker in self.pool.ready(Role.DECODE)
            if worker.handshake.local_prefill and worker not in context.failed
        ]
        home = self.home(context, Role.DECODE)
        return min(able, key=lambda worker: (worker is not home, worker.in_flight), default=None)

    def _apart(self, context: RequestContext) -> bool:
        return self._any(context, Role.PREFILL) and self._any(context, Role.DECODE)

    def _any(self, context: RequestContext, role: Role) -> bool:
        return any(worker not in context.failed for worker in self.pool.ready(role))
