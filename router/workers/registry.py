"""The registry of servers and their workers: which exist, which are alive, how busy they are.

Owns the health checks; the requests to workers are in ``handshake.py``, the workers of one model in
``group.py``. The choice of a worker for a turn is made by ``ppd.planning`` and ``ppd.placement``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from ppd.contract import Role
from ppd.errors import WorkerError
from ppd.headroom import Headroom

from ..wire.errors import describe
from .breaker import Breaker
from .group import ModelWorkers
from .handshake import await_server, check_ready, connect_server, fetch_loads
from .sglang import Handshake, Load
from .worker import Server, Worker

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
        servers: all servers, in the order in which they joined.
        drained: ``boot_id`` by URL of workers that operators have drained; such a process is
            draining when it joins, or when the router sees that it has restarted.
        join_event: set when a server joins.
        models: the workers of each model, in the order of ``names``.
    """

    control: aiohttp.ClientSession
    make_breaker: Callable[[], Breaker] = Breaker
    names: tuple[str, ...] = ()
    on_join: Callable[[Worker], None] = lambda _worker: None
    on_leave: Callable[[Worker], None] = lambda _worker: None
    servers: list[Server] = field(init=False, default_factory=list)
    drained: dict[str, str | None] = field(default_factory=dict)
    join_event: asyncio.Event = field(default_factory=asyncio.Event)
    models: tuple[ModelWorkers, ...] = field(init=False)
    _by_name: dict[str, ModelWorkers] = field(init=False)
    _warned_urls: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.models = tuple(map(ModelWorkers, self.names or ("",)))
        self._by_name = dict(zip(self.names, self.models, strict=False))

    @property
    def workers(self) -> list[Worker]:
        """All workers, those of one server together."""
        return [worker for server in self.servers for worker in server.ranks]

    def at(self, url: str) -> Server | None:
        """The server at a URL; None if there is none."""
        return next((server for server in self.servers if server.url == url), None)

    def served_by(self, server: Server) -> ModelWorkers:
        """The workers of a server's model.

        Raises:
            WorkerError: the router does not serve its model.
        """
        if not self.names:
            return self.models[0]
        found = self._by_name.get(server.handshake.models[0])
        if found is None:
            raise WorkerError(
                f"{server.url} serves {server.handshake.models[0]}, and this router serves "
                f"{', '.join(self.names)}"
            )
        return found

    def join(self, server: Server) -> None:
        """Add a server and its workers.

        Raises:
            WorkerError: it serves other models than the router or the model's other workers, or
                its process is registered under another URL.
        """
        model = self.served_by(server)
        model.check(server)
        self._check_process(server)
        self._warn_of_description(server)
        _warn_if_unpatched(server)
        if server.url in self.drained:
            server.draining = self.drained.pop(server.url) == server.handshake.boot_id
        self.servers.append(server)
        for worker in server.ranks:
            self._enlist(worker, model)
        self.join_event.set()
        model.on_members()
        model.on_change()

    def _enlist(self, worker: Worker, model: ModelWorkers) -> None:
        worker.breaker = self.make_breaker()
        model.join(worker)
        self.on_join(worker)

    def _check_process(self, server: Server) -> None:
        boot_id = server.handshake.boot_id
        for other in self.servers:
            if other.alive and boot_id is not None and other.handshake.boot_id == boot_id:
                raise WorkerError(f"{server.url} is the process that is known as {other.url}")

    def _warn_of_description(self, server: Server) -> None:
        """Log a description that cannot be used, once for each URL."""
        problem = server.handshake.description_problem
        if problem is not None and server.url not in self._warned_urls:
            self._warned_urls.add(server.url)
            logger.warning(
                "%s worker %s is served as a plain PD worker: %s", server.role, server.url, problem
            )

    def leave(self, server: Server, *, stays_drained: bool = False) -> None:
        """Remove a server; it gets no new work, and its open legs end by themselves.

        A server that has left already is not removed again.

        Args:
            server: to be removed.
            stays_drained: whether an operator's drain is in force again if the process rejoins; it
                has to have a ``boot_id``.
        """
        server.alive = False
        if server not in self.servers:
            return
        boot_id = server.handshake.boot_id
        if stays_drained and server.draining and boot_id is not None:
            self.drained[server.url] = boot_id
        self.servers.remove(server)
        for worker in server.ranks:
            self._dismiss(worker)
        self.served_by(server).on_members()

    def _dismiss(self, worker: Worker) -> None:
        self.served_by(worker.server).leave(worker)
        self.on_leave(worker)

    def report(self, server: Server, loads: Sequence[Load | None]) -> None:
        """Record a server's report of its load, by rank; None where it no longer reports any."""
        # Their number may have changed since they were asked.
        for worker, load in zip(server.ranks, loads, strict=False):
            worker.load = load
            worker.headroom.report(None if load is None else load.free_tokens)
        self.served_by(server).on_change()

    def lacks(self, roles: Collection[Role]) -> list[Role]:
        """The roles that no model has all workers of; [] if a model has one of each."""
        return min((model.lacks(roles) for model in self.models), key=len)

    @property
    def special_tokens(self) -> frozenset[str]:
        """The models' special tokens of unusual form that the workers report."""
        return frozenset[str]().union(*(s.handshake.special_tokens for s in self.servers))

    def mark_dead(self, server: Server, reason: str) -> None:
        """Mark a server as down, and log it if it was alive."""
        if server.alive:
            logger.warning("worker down: %s %s (%s)", server.role, server.url, reason)
            server.alive = False

    async def probe_forever(self, interval_s: float) -> None:
        """Check the health of every server again and again.

        The checks run concurrently: one that hangs delays no other.

        Args:
            interval_s: seconds between two checks of a server.
        """
        pending: set[Server] = set()

        async def probe(server: Server) -> None:
            try:
                await self.check(server)
            except Exception:  # a bug of the router must not end the health checks
                logger.exception("the health check of %s failed", server.url)
            finally:
                pending.remove(server)

        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(interval_s)
                for server in self.servers:
                    if server not in pending:
                        pending.add(server)
                        probes.create_task(probe(server))

    async def check(self, server: Server) -> None:
        """Check a server's health now; one that was down is revived by a new handshake."""
        try:
            if server.alive:
                await check_ready(self.control, server.url)
                if server.role is Role.DECODE and not server.announces_load:
                    before = [worker.load for worker in server.ranks]
                    loads = await fetch_loads(self.control, server.url, before)
                    if not server.announces_load:  # meanwhile
                        self.report(server, loads)
                return
            reconnected = await connect_server(self.control, server.role, server.url)
            model = self.served_by(reconnected)
            model.check(reconnected)
            if model is not self.served_by(server):
                raise WorkerError(f"{server.url} serves {model.name} now")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.mark_dead(server, describe(error))
        except WorkerError as error:
            logger.warning("worker stays down: %s", error)
        else:
            if self.at(server.url) is server:  # it may have left meanwhile
                self._revive(server, reconnected.handshake, model)

    def _revive(self, server: Server, handshake: Handshake, model: ModelWorkers) -> None:
        restarted = handshake.boot_id is None or handshake.boot_id != server.handshake.boot_id
        for worker in server.ranks[handshake.dp_size :]:
            self._dismiss(worker)
        begun = server.revive(handshake, restarted=restarted)
        drained = self.drained.pop(server.url, None)
        if drained is not None and drained == handshake.boot_id:
            server.draining = True
        self._warn_of_description(server)
        model.update_adapters()
        for worker in server.ranks:
            if worker in begun:
                self._enlist(worker, model)
            else:
                worker.breaker, worker.headroom = self.make_breaker(), Headroom()
                self.on_join(worker)
        model.on_members()
        logger.info(
            "worker up again: %s %s (%s)",
            server.role,
            server.url,
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
    handshakes = (await_server(control, role, url, deadline_s) for role, url in wanted)
    registry = WorkerRegistry(control, make_breaker, names, drained=dict(drained or {}))
    for server in await asyncio.gather(*handshakes):
        registry.join(server)
    return registry


def _warn_if_unpatched(server: Server) -> None:
    handshake = server.handshake
    if server.role is not Role.DECODE or handshake.local_prefill or handshake.description_problem:
        return
    logger.warning(
        "decode worker %s does not offer local prefill (start it by ppd-worker, or with "
        "PPD_ENABLE=1 where sglang-ppd is installed): its turns stay remote",
        server.url,
    )
