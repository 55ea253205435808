"""Workers and clusters without sockets, as planning, placement and attempts see them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ppd.contract import Role
from ppd.headroom import Headroom
from ppd.placement import WorkerView, place


def reporting(free_tokens: int | None) -> Headroom:
    """The headroom of a worker that has reported."""
    headroom = Headroom()
    headroom.report(free_tokens)
    return headroom


@dataclass(slots=True, eq=False)
class FakeWorker:
    """A ``WorkerView`` whose state a test sets."""

    identity: str
    role: Role = Role.DECODE
    takes_appends: bool = True
    page_size: int = 16
    running: int = 7
    in_flight: int = 0
    room: bool = True
    ready: bool = True
    headroom: Headroom = field(default_factory=lambda: reporting(5000))
    dropped: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.identity

    def has_room(self, tokens: int) -> bool:
        return self.room

    def evicted_tokens(self, session: int) -> int:
        return self.dropped.get(session, 0)


class FakeCluster:
    """A ``ClusterView``; the opening is the policy's unless a test sets one."""

    def __init__(self, *workers: FakeWorker, decode_workers: int = 4) -> None:
        self.workers = list(workers)
        self.decode_workers = decode_workers

    def of(self, identity: str) -> FakeWorker:
        return next(w for w in self.workers if w.identity == identity)

    def find(self, identity: str | None) -> FakeWorker | None:
        return next((w for w in self.workers if w.identity == identity and w.ready), None)

    def ready(self, role: Role) -> list[FakeWorker]:
        return [w for w in self.workers if w.role is role and w.ready]

    def has(self, role: Role) -> bool:
        return any(w.role is role for w in self.workers)

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        seed = None if root is None else int.from_bytes(root[:8])
        return place(self.ready(role), prefer, avoid, tokens, seed)

    def opening(self, root: bytes | None) -> None:
        return None
