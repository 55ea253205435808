"""The registry of workers: which exist, which are alive, how busy they are.

Owns the health checks; the requests to workers are in ``handshake.py``. The choice of a worker for
a turn is made by ``ppd.planning`` and ``ppd.placement``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from ppd.contract import Role
from ppd.decision import Route
from ppd.errors import WorkerError
from ppd.headroom import Headroom
from ppd.placement import WorkerView, opening_side, place

from ..wire.errors import describe
from .breaker import Breaker
from .handshake import await_worker, check_ready, connect_worker, fetch_load
from .sglang import Handshake, Load
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

# An enum's attribute is slow to look up (Python 3.11), and every request would.
_DECODE, _REPLICA = Role.DECODE, Role.REPLICA


@dataclass(slots=True)
class WorkerRegistry:
    """All workers of the router; a ``ppd.placement.ClusterView``.

    Attributes:
        control: the client session for handshakes and health checks. It has short timeouts and
            opens a connection for each request, because a worker may have closed an idle one.
        make_breaker: makes the circuit breaker of a worker.
        on_change: called when a worker may have room for a request that waits.
        on_join: called with a worker that has joined or is alive again.
        on_leave: called with a worker that has left.
        workers: all workers, in the order in which they joined.
        drained: ``boot_id`` by URL of workers that operators had drained before the router
            started; they are draining when they join.
        join_event: set when a worker joins.
    """

    control: aiohttp.ClientSession
    make_breaker: Callable[[], Breaker] = Breaker
    on_change: Callable[[], None] = lambda: None
    on_join: Callable[[Worker], None] = lambda _worker: None
    on_leave: Callable[[Worker], None] = lambda _worker: None
    workers: list[Worker] = field(default_factory=list)
    drained: dict[str, str | None] = field(default_factory=dict)
    join_event: asyncio.Event = field(default_factory=asyncio.Event)
    _first: Handshake | None = None
    _by_role: dict[Role, list[Worker]] = field(init=False)
    _warned_urls: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._by_role = {role: [w for w in self.workers if w.role is role] for role in Role}

    def of(self, role: Role) -> Sequence[Worker]:
        """The workers of a role, ready or not."""
        return self._by_role[role]

    def at(self, url: str) -> Worker | None:
        """The worker at a URL; None if there is none."""
        return next((w for w in self.workers if w.url == url), None)

    def join(self, worker: Worker) -> None:
        """Add a worker.

        Raises:
            WorkerError: it serves other models than the others, or its process is registered
                under another URL.
        """
        self._check_models(worker)
        self._check_process(worker)
        self._warn_of_description(worker)
        _warn_if_unpatched(worker)
        self._first = self._first or worker.handshake
        worker.breaker = self.make_breaker()
        if worker.url in self.drained:
            worker.draining = self.drained.pop(worker.url) == worker.handshake.boot_id
        self.workers.append(worker)
        self._by_role[worker.role].append(worker)
        self.join_event.set()
        self.on_join(worker)
        self.on_change()

    def _check_process(self, worker: Worker) -> None:
        boot_id = worker.handshake.boot_id
        for other in self.workers:
            if other.alive and boot_id is not None and other.handshake.boot_id == boot_id:
                raise WorkerError(f"{worker.url} is the process that is known as {other.url}")

    def _check_models(self, worker: Worker) -> None:
        if self._first is not None and worker.handshake.models != self._first.models:
            raise WorkerError(
                f"workers serve different models: {', '.join(worker.handshake.models)} on "
                f"{worker.url}, {', '.join(self._first.models)} elsewhere"
            )

    def _warn_of_description(self, worker: Worker) -> None:
        """Log a description that cannot be used, once for each URL."""
        problem = worker.handshake.description_problem
        if problem is not None and worker.url not in self._warned_urls:
            self._warned_urls.add(worker.url)
            logger.warning(
                "%s worker %s is served as a plain PD worker: %s", worker.role, worker.url, problem
            )

    def leave(self, worker: Worker) -> None:
        """Remove a worker; it gets no new work, and its open legs end by themselves."""
        worker.alive = False
        self.workers.remove(worker)
        self._by_role[worker.role].remove(worker)
        self.on_leave(worker)

    def report(self, worker: Worker, load: Load | None) -> None:
        """Record a worker's report of its load; None if it no longer reports any."""
        worker.load = load
        worker.headroom.report(None if load is None else load.free_tokens)
        self.on_change()

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

    @property
    def shape(self) -> str:
        """The number of workers of each role, as tables name it: ``1P3D``."""
        count = Counter(worker.role for worker in self.workers)
        return "".join(f"{count[role]}{role.value[0].upper()}" for role in Role if count[role])

    @property
    def first(self) -> Handshake:
        """The handshake of the first worker that joined; all others serve the same models."""
        assert self._first is not None, "a router serves when its registry is complete"
        return self._first

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that the workers serve."""
        return self.first.models

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids of the model; None if no worker reports it."""
        for worker in self.workers:
            if worker.handshake.vocab_size is not None:
                return worker.handshake.vocab_size
        return None

    @property
    def special_tokens(self) -> frozenset[str]:
        """The model's special tokens of unusual form that the workers report."""
        return frozenset[str]().union(*(w.handshake.special_tokens for w in self.workers))

    def mark_dead(self, worker: Worker, reason: str) -> None:
        """Mark a worker as down, and log it if it was alive."""
        if worker.alive:
            logger.warning("worker down: %s %s (%s)", worker.role, worker.url, reason)
            worker.alive = False

    async def probe_forever(self, interval_s: float) -> None:
        """Check the health of every worker again and again.

        The checks run concurrently: one that hangs delays no other.

        Args:
            interval_s: seconds between two checks of a worker.
        """
        pending: set[Worker] = set()

        async def probe(worker: Worker) -> None:
            try:
                await self.check(worker)
            except Exception:  # a bug of the router must not end the health checks
                logger.exception("the health check of %s failed", worker.url)
            finally:
                pending.remove(worker)

        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(interval_s)
                for worker in self.workers:
                    if worker not in pending:
                        pending.add(worker)
                        probes.create_task(probe(worker))

    async def check(self, worker: Worker) -> None:
        """Check a worker's health now; one that was down is revived by a new handshake."""
        try:
            if worker.alive:
                await check_ready(self.control, worker.url)
                if worker.role is Role.DECODE and worker.announced_at_s is None:
                    self.report(worker, await fetch_load(self.control, worker.url, worker.load))
                return
            reconnected = await connect_worker(self.control, worker.role, worker.url)
            self._check_models(reconnected)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.mark_dead(worker, describe(error))
        except WorkerError as error:
            logger.warning("worker stays down: %s", error)
        else:
            handshake = reconnected.handshake
            restarted = handshake.boot_id is None or handshake.boot_id != worker.handshake.boot_id
            worker.revive(handshake, restarted=restarted)
            self._warn_of_description(worker)
            worker.breaker, worker.headroom = self.make_breaker(), Headroom()
            self.on_join(worker)
            logger.info(
                "worker up again: %s %s (%s)",
                worker.role,
                worker.url,
                "restarted" if restarted else "the same process",
            )


async def connect(
    control: aiohttp.ClientSession,
    urls: Mapping[Role, Iterable[str]],
    timeout_s: float,
    make_breaker: Callable[[], Breaker] = Breaker,
    drained: Mapping[str, str | None] | None = None,
) -> WorkerRegistry:
    """Perform the handshake with all workers, and return their registry.

    Args:
        control: a session with short timeouts.
        urls: base URLs of the workers by role.
        timeout_s: for all handshakes together; workers may still be starting.
        make_breaker: makes the circuit breaker of a worker.
        drained: ``boot_id`` by URL of workers that operators have drained.

    Raises:
        WorkerError: a worker did not answer in time, or is not what the router needs.
    """
    wanted = [(role, url) for role, urls_of_role in urls.items() for url in urls_of_role]
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    handshakes = (await_worker(control, role, url, deadline_s) for role, url in wanted)
    registry = WorkerRegistry(control, make_breaker, drained=dict(drained or {}))
    for worker in await asyncio.gather(*handshakes):
        registry.join(worker)
    return registry


def _warn_if_unpatched(worker: Worker) -> None:
    handshake = worker.handshake
    if worker.role is not Role.DECODE or handshake.local_prefill or handshake.description_problem:
        return
    logger.warning(
        "decode worker %s does not offer local prefill (start it by ppd-worker, or with "
        "PPD_ENABLE=1 where sglang-ppd is installed): its turns stay remote",
        worker.url,
    )
