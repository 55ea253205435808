"""The workers the router knows: who they are, whether they live, how busy they are.

Owns the health probe; what is asked of a worker is ``handshake.py``'s. Which worker a turn
should go to beyond "alive and least busy" is not decided here.
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
from .handshake import ask_load, await_worker, check_ready, connect_worker
from .sglang import Handshake, Load
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")


@dataclass(slots=True)
class WorkerRegistry:
    """All workers; what ``ppd.planning`` sees of the cluster.

    ``control``: for handshakes and probes; with short timeouts, and a connection for each, so
    that none of them meets one that the worker has closed. ``make_breaker``: one for a
    worker. ``changed``: there may be room where there was none. ``met``, ``parted``: a worker has
    joined or come back, or left. ``drained``: processes of workers,
    by URL, that get no work when they join: operators had drained them before this router began.
    """

    control: aiohttp.ClientSession
    make_breaker: Callable[[], Breaker] = Breaker
    changed: Callable[[], None] = lambda: None
    met: Callable[[Worker], None] = lambda _worker: None
    parted: Callable[[Worker], None] = lambda _worker: None
    workers: list[Worker] = field(default_factory=list)
    drained: dict[str, str | None] = field(default_factory=dict)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    _first: Handshake | None = None
    _of: dict[Role, list[Worker]] = field(init=False)

    def __post_init__(self) -> None:
        self._of = {role: [w for w in self.workers if w.role is role] for role in Role}

    def of(self, role: Role) -> Sequence[Worker]:
        return self._of[role]

    def at(self, url: str) -> Worker | None:
        return next((w for w in self.workers if w.url == url), None)

    def join(self, worker: Worker) -> None:
        """Raises:
        WorkerError: it does not serve what the others do, or is known by another URL.
        """
        self._check_models(worker)
        self._check_process(worker)
        _warn_if_unpatched(worker)
        self._first = self._first or worker.handshake
        worker.breaker = self.make_breaker()
        if worker.url in self.drained:
            worker.draining = self.drained.pop(worker.url) == worker.handshake.boot_id
        self.workers.append(worker)
        self._of[worker.role].append(worker)
        self.joined.set()
        self.met(worker)
        self.changed()

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

    def leave(self, worker: Worker) -> None:
        """It gets no new work; legs under way are left to end."""
        worker.alive = False
        self.workers.remove(worker)
        self._of[worker.role].remove(worker)
        self.parted(worker)

    def report(self, worker: Worker, load: Load | None) -> None:
        """Take a worker's report of its load; None: it reports no more."""
        worker.load = load
        worker.headroom.report(None if load is None else load.free_tokens)
        self.changed()

    # -- ppd.placement.ClusterView -------------------------------------------------------

    def find(self, identity: str | None) -> Worker | None:
        """The worker of that identity, if it may be given work and has not restarted since."""
        for worker in self.workers:
            if worker.identity == identity and worker.ready:
                return worker
        return None

    def ready(self, role: Role) -> list[Worker]:
        """The workers of a role that may be given work.

        If all that are alive fail their requests, these all the same: leaving every one of them
        alone would help nobody.
        """
        able = [w for w in self._of[role] if w.ready]
        return able or [w for w in self._of[role] if w.alive and not w.draining]

    def has(self, role: Role) -> bool:
        """Whether there is any worker of that role, ready or not."""
        return bool(self._of[role])

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        """The worker of that role for a request (``ppd.placement.place``); None: none is ready."""
        seed = None if root is None else int.from_bytes(root[:8])
        return place(self.ready(role), prefer, avoid, tokens, seed)

    def opening(self, root: bytes | None) -> Route | None:
        """The side of a turn without a home, where there are replicas beside other workers."""
        if not self._of[Role.REPLICA]:
            return None
        replicas, prefill, decode = map(self.ready, (Role.REPLICA, Role.PREFILL, Role.DECODE))
        return opening_side(replicas, prefill, decode, root)

    def has_room(self, tokens: int) -> bool:
        """Whether some worker that decodes has KV for so many tokens; True if none is ready."""
        any_ready = False
        for role in (Role.DECODE, Role.REPLICA):
            for worker in self._of[role]:
                if worker.ready:
                    if worker.has_room(tokens):
                        return True
                    any_ready = True
        return not any_ready

    @property
    def decode_workers(self) -> int:
        """Living ones; replicas decode too."""
        return sum(w.ready for w in self.workers if w.role is not Role.PREFILL)

    @property
    def shape(self) -> str:
        """As tables name it: ``1P3D``."""
        count = Counter(worker.role for worker in self.workers)
        return "".join(f"{count[role]}{role.value[0].upper()}" for role in Role if count[role])

    @property
    def first(self) -> Handshake:
        """Of the first worker that joined; the others serve the same."""
        assert self._first is not None, "a router serves when its pool is complete"
        return self._first

    @property
    def models(self) -> tuple[str, ...]:
        return self.first.models

    @property
    def vocab_size(self) -> int | None:
        """Of the one model that all workers serve, if one of them told."""
        for worker in self.workers:
            if worker.handshake.vocab_size is not None:
                return worker.handshake.vocab_size
        return None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Of that model, as far as its workers tell."""
        return frozenset[str]().union(*(w.handshake.special_tokens for w in self.workers))

    def mark_dead(self, worker: Worker, why: str) -> None:
        if worker.alive:
            logger.warning("worker down: %s %s (%s)", worker.role, worker.url, why)
            worker.alive = False

    async def probe_forever(self, interval_s: float) -> None:
        """Ask every worker for its health again and again; revive it by a new handshake.

        Nobody waits for one that hangs.
        """
        asked: set[Worker] = set()

        async def ask(worker: Worker) -> None:
            try:
                await self.check(worker)
            except Exception:  # a bug of ours: the others shall be asked again, and this one too
                logger.exception("a look at %s failed", worker.url)
            finally:
                asked.remove(worker)

        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(interval_s)
                for worker in self.workers:
                    if worker not in asked:
                        asked.add(worker)
                        probes.create_task(ask(worker))

    async def check(self, worker: Worker) -> None:
        """Find out now whether a worker lives."""
        try:
            if worker.alive:
                await check_ready(self.control, worker.url)
                if worker.role is Role.DECODE and worker.announced_at_s is None:
                    self.report(worker, await ask_load(self.control, worker.url, worker.load))
                return
            again = await connect_worker(self.control, worker.role, worker.url)
            self._check_models(again)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.mark_dead(worker, describe(error))
        except WorkerError as error:
            logger.warning("worker stays down: %s", error)
        else:
            handshake = again.handshake
            restarted = handshake.boot_id is None or handshake.boot_id != worker.handshake.boot_id
            worker.reconnected(handshake, restarted=restarted)
            worker.breaker, worker.headroom = self.make_breaker(), Headroom()
            self.met(worker)
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
    """Shake hands with all workers, waiting for those that are still starting.

    Raises:
        WorkerError: a worker did not answer in time, or is not what it was given as.
    """
    wanted = [(role, url) for role, of_role in urls.items() for url in of_role]
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    shakes = (await_worker(control, role, url, deadline_s) for role, url in wanted)
    pool = WorkerRegistry(control, make_breaker, drained=dict(drained or {}))
    for worker in await asyncio.gather(*shakes):
        pool.join(worker)
    return pool


def _warn_if_unpatched(worker: Worker) -> None:
    if worker.role is Role.DECODE and not worker.handshake.local_prefill:
        logger.warning(
            "decode worker %s does not offer local prefill (start it by ppd-worker, or with "
            "PPD_ENABLE=1 where sglang-ppd is installed): its turns stay remote",
            worker.url,
        )
