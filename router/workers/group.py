"""The workers of one model, among which its turns are placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import WorkerError
from ppd.machine import Machine
from ppd.placement import WorkerView, opening_side, place

from .sglang import Handshake
from .worker import Server, Worker

# An enum's attribute is slow to look up (Python 3.11), and every request would.
_DECODE, _REPLICA = Role.DECODE, Role.REPLICA


def _nothing() -> None:
    pass


class ModelWorkers:
    """The workers of one model; a ``ppd.placement.ClusterView``.

    Args:
        configured: the model's name; "": that of the first worker's model.

    Attributes:
        workers: in the order in which they joined.
        on_change: called when a worker may have room for a request that waits.
        on_members: called when a server has joined or left.
    """

    def __init__(self, configured: str = "") -> None:
        self._configured = configured
        self.workers: list[Worker] = []
        self.on_change: Callable[[], None] = _nothing
        self.on_members: Callable[[], None] = _nothing
        self._first: Handshake | None = None
        self._adapters: tuple[str, ...] = ()
        self._by_role: dict[Role, list[Worker]] = {role: [] for role in Role}

    def check(self, server: Server) -> None:
        """Check that a server serves this model. Its adapters may be others.

        Raises:
            WorkerError: it does not.
        """
        name = server.handshake.models[0]
        if self._first is not None and name != self.name:
            raise WorkerError(
                f"workers serve different models: {name} on {server.url}, {self.name} elsewhere"
            )

    def join(self, worker: Worker) -> None:
        """Add a worker that has been checked."""
        self._first = self._first or worker.handshake
        self.workers.append(worker)
        self._by_role[worker.role].append(worker)
        self.update_adapters()

    def leave(self, worker: Worker) -> None:
        """Remove a worker."""
        self.workers.remove(worker)
        self._by_role[worker.role].remove(worker)
        self.update_adapters()

    def update_adapters(self) -> None:
        """Collect the names of adapters; call it when a worker has a new handshake.

        SGLang lists them in the order of their last use, which differs between workers.
        """
        of_all = (worker.handshake.models[1:] for worker in self.workers)
        self._adapters = tuple(sorted(set().union(*of_all)))

    def of(self, role: Role) -> Sequence[Worker]:
        """The workers of a role, ready or not."""
        return self._by_role[role]

    # -- ppd.placement.ClusterView -------------------------------------------------------

    def find(self, identity: str | None) -> Worker | None:
        """The ready worker of an identity; None if it has left, restarted or is not ready."""
        for worker in self.workers:
            if worker.identity == identity and worker.ready:
                return worker
        return None

    def ready(self, role: Role) -> list[Worker]:
        """The workers of a role that may be given work.

        If the breakers of all workers that are alive are open, these workers are returned all the
        same: there is no other to send requests to.
        """
        ready = [w for w in self._by_role[role] if w.ready]
        return ready or [w for w in self._by_role[role] if w.alive and not w.draining]

    def has(self, role: Role) -> bool:
        """Whether there is a worker of the role, ready or not."""
        return bool(self._by_role[role])

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        """The worker of a role for a request; None if none is ready.

        The arguments are those of ``ppd.placement.place``.
        """
        seed = None if root is None else int.from_bytes(root[:8])
        return place(self.ready(role), prefer, avoid, tokens, seed)

    def opening(self, root: bytes | None) -> Route | None:
        """The side of a turn without a home; None without replicas, where there is no choice."""
        if not self._by_role[_REPLICA]:
            return None
        replicas, prefill, decode = map(self.ready, (Role.REPLICA, Role.PREFILL, Role.DECODE))
        return opening_side(replicas, prefill, decode, root)

    def has_room(self, tokens: int) -> bool:
        """Whether a ready worker that decodes has KV for ``tokens`` tokens; True without any."""
        any_ready = False
        for role in (_DECODE, _REPLICA):
            for worker in self._by_role[role]:
                if worker.ready:
                    if worker.has_room(tokens):
                        return True
                    any_ready = True
        return not any_ready

    @property
    def decode_workers(self) -> int:
        """The number of ready workers that decode; replicas count."""
        return sum(w.ready for w in self.workers if w.role is not Role.PREFILL)

    # -- what they serve -----------------------------------------------------------------

    def lacks(self, roles: Collection[Role]) -> list[Role]:
        """The roles of which there is no worker, ready or not."""
        return [role for role in roles if not self._by_role[role]]

    @property
    def shape(self) -> str:
        """The number of servers of each role, as tables name it: ``1P3D``."""
        count = Counter(worker.role for worker in self.workers if worker.rank == 0)
        return "".join(f"{count[role]}{role.value[0].upper()}" for role in Role if count[role])

    @property
    def machines(self) -> frozenset[Machine]:
        """What the workers run on; those that report no GPU are left out."""
        return frozenset(
            worker.handshake.machine for worker in self.workers if worker.handshake.machine.gpu
        )

    @property
    def name(self) -> str:
        """The model's own name, without those of adapters."""
        if self._first is None:
            assert self._configured, "a router serves one model when its first worker has joined"
            return self._configured
        return self._first.models[0]

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests use: the model's own first, then those of adapters."""
        return (self.name, *self._adapters)

    @property
    def max_model_tokens(self) -> int | None:
        """The longest context; None if not reported, or before the first worker."""
        return None if self._first is None else self._first.max_model_tokens

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids of the model; None if no worker reports it."""
        for worker in self.workers:
            if worker.handshake.vocab_size is not None:
                return worker.handshake.vocab_size
        return None
