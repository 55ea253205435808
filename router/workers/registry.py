"""The registry of workers: which exist, which are alive, how busy they are.

Owns the health checks; the requests to workers are in ``handshake.py``, the workers of one model in
``group.py``. The choice of a worker for a turn is made by ``ppd.planning`` and ``ppd.placement``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp

from ppd.contract import Role
from ppd.errors import WorkerError
from ppd.headroom import Headroom

from ..wire.errors import describe
from .breaker import Breaker
from .group import ModelWorkers
from .handshake import await_worker, check_ready, connect_worker, fetch_load
from .sglang import Load
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")


@dataclass(slots=True)
class WorkerRegistry:
    """All workers of the router, by model.

    Attributes:
        control: the client session for handshakes and health checks. It has short timeouts and
            opens a connection for each request, because a worker may have closed an idle one.
        make_breaker: makes the circuit breaker of a worker.
        names: of the models that the router serves; () for one, that of the first worker.
        on_join: called with a worker that has joined or is alive again.
        on_leave: called with a worker that has left.
        workers: all workers, in the order in which they joined.
        drained: ``boot_id`` by URL of workers that operators had drained before the router
            started; they are draining when they join.
        join_event: set when a worker joins.
        models: the workers of each model, in the order of ``names``.
    """

    control: aiohttp.ClientSession
    make_breaker: Callable[[], Breaker] = Breaker
    names: tuple[str, ...] = ()
    on_join: Callable[[Worker], None] = lambda _worker: None
    on_leave: Callable[[Worker], None] = lambda _worker: None
    workers: list[Worker] = field(init=False, default_factory=list)
    drained: dict[str, str | None] = field(default_factory=dict)
    join_event: asyncio.Event = field(default_factory=asyncio.Event)
    models: tuple[ModelWorkers, ...] = field(init=False)
    _by_name: dict[str, ModelWorkers] = field(init=False)
    _warned_urls: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.models = tuple(map(ModelWorkers, self.names or ("",)))
        self._by_name = dict(zip(self.names, self.models, strict=False))

    def at(self, url: str) -> Worker | None:
        """The worker at a URL; None if there is none."""
        return next((w for w in self.workers if w.url == url), None)

    def served_by(self, worker: Worker) -> ModelWorkers:
        """The workers of a worker's model.

        Raises:
            WorkerError: the router does not serve its model.
        """
        if not self.names:
            return self.models[0]
        found = self._by_name.get(worker.handshake.models[0])
        if found is None:
            raise WorkerError(
                f"{worker.url} serves {worker.handshake.models[0]}, and this router serves "
                f"{', '.join(self.names)}"
            )
        return found

    def join(self, worker: Worker) -> None:
        """Add a worker.

        Raises:
            WorkerError: it serves other models than the router or the model's other workers, or
                its process is registered under another URL.
        """
        model = self.served_by(worker)
        model.check(worker)
        self._check_process(worker)
        self._warn_of_description(worker)
        _warn_if_unpatched(worker)
        worker.breaker = self.make_breaker()
        if worker.url in self.drained:
            worker.draining = self.drained.pop(worker.url) == worker.handshake.boot_id
        self.workers.append(worker)
        model.join(worker)
        self.join_event.set()
        self.on_join(worker)
        model.on_change()

    def _check_process(self, worker: Worker) -> None:
        boot_id = worker.handshake.boot_id
        for other in self.workers:
            if other.alive and boot_id is not None and other.handshake.boot_id == boot_id:
                raise WorkerError(f"{worker.url} is the process that is known as {other.url}")

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
        self.served_by(worker).leave(worker)
        self.on_leave(worker)

    def report(self, worker: Worker, load: Load | None) -> None:
        """Record a worker's report of its load; None if it no longer reports any."""
        worker.load = load
        worker.headroom.report(None if load is None else load.free_tokens)
        self.served_by(worker).on_change()

    def lacks(self, roles: Collection[Role]) -> list[Role]:
        """The roles that no model has all workers of; [] if a model has one of each."""
        return min((model.lacks(roles) for model in self.models), key=len)

    @property
    def special_tokens(self) -> frozenset[str]:
        """The models' special tokens of unusual form that the workers report."""
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
            model = self.served_by(reconnected)
            model.check(reconnected)
            if model is not self.served_by(worker):
                raise WorkerError(f"{worker.url} serves {model.name} now")
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
    names: tuple[str, ...] = (),
) -> WorkerRegistry:
    """Perform the handshake with all workers, and return their registry.

    Args:
        control: a session with short timeouts.
        urls: base URLs of the workers by role.
        timeout_s: for all handshakes together; workers may still be starting.
        make_breaker: makes the circuit breaker of a worker.
        drained: ``boot_id`` by URL of workers that operators have drained.
        names: of the models that the router serves; () for one, that of the first worker.

    Raises:
        WorkerError: a worker did not answer in time, or is not what the router needs.
    """
    wanted = [(role, url) for role, urls_of_role in urls.items() for url in urls_of_role]
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    handshakes = (await_worker(control, role, url, deadline_s) for role, url in wanted)
    registry = WorkerRegistry(control, make_breaker, names, drained=dict(drained or {}))
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
