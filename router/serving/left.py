"""Who is left for a turn, after what has failed it: asked between one try and the next."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.contract import Role
from ppd.decision import Decision, Route

from ..workers.cluster import WorkerPool
from ..workers.worker import Worker
from .course import Course


@dataclass(frozen=True)
class Left:
    """``escapes``: without prefill worker, decode workers prefill whole prompts."""

    pool: WorkerPool
    escapes: bool

    def on_replica(self, course: Course) -> bool:
        """Whether a replica takes the turn now: as decided, unless only replicas are left, or only
        the others; then the decision becomes that."""
        decided = course.decision.route is Route.REPLICA
        if not self.pool.of(Role.REPLICA):
            return decided
        replicas, apart = self._any(course, Role.REPLICA), self._apart(course)
        if replicas is apart or replicas is decided:
            return decided
        route = Route.REPLICA if replicas else Route.REMOTE
        course.decision = Decision(route, course.decision.reason)
        return replicas

    def beside(self, course: Course, worker: Worker) -> bool:
        """Whether someone else can do what ``worker`` did not."""
        if self._any(course, worker.role) or self.way_out(course) is not None:
            return True
        if worker.role is Role.REPLICA:
            return self._apart(course)
        return self._any(course, Role.REPLICA)

    def home(self, course: Course, role: Role) -> Worker | None:
        """The conversation's home, if it is of that role and may be given work."""
        home = self.pool.by_identity(course.hit.turn.home) if course.hit else None
        return home if home is not None and home.role is role else None

    def way_out(self, course: Course) -> Worker | None:
        """A decode worker that can prefill the whole prompt, where no prefill worker is left."""
        if not self.escapes or course.inbound.chain is None or self._any(course, Role.PREFILL):
            return None
        able = [
            worker
            for worker in self.pool.ready(Role.DECODE)
            if worker.handshake.local_prefill and worker not in course.failed
        ]
        home = self.home(course, Role.DECODE)
        return min(able, key=lambda worker: (worker is not home, worker.in_flight), default=None)

    def _apart(self, course: Course) -> bool:
        return self._any(course, Role.PREFILL) and self._any(course, Role.DECODE)

    def _any(self, course: Course, role: Role) -> bool:
        return any(worker not in course.failed for worker in self.pool.ready(role))
