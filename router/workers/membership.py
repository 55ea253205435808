"""Workers that come and go: announcements, goodbyes, and those that have fallen silent.

What a worker says is a hint. Before it gets work the router shakes hands with it, as with
workers given at start; who may announce at all is told by a shared secret.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from ppd.announcement import PATH, Announcement, parse
from ppd.contract import Role
from ppd.errors import ContractError, RequestError, WorkerError

from ..config.options import url_problem
from ..peers import PASSED_ON, Peers
from ..wire.access import carries_token, is_loopback
from ..wire.errors import describe
from .handshake import connect_worker
from .registry import WorkerRegistry
from .sglang import Load
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")

_NO_TOKEN = "set $PPD_WORKER_TOKEN here and at the workers"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Membership:
    """
    Args:
        roles: of the workers that the router's policy uses.
        token: announcements must carry it; "": they must come from this host (or through a proxy
            on it).
        networks: they must come from there, and lead there; () if from anywhere.
        siblings: pass on what they are told.
        budget_s: an announced worker that is silent for longer is dropped.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pool: WorkerRegistry,
        *,
        roles: Collection[Role],
        token: str,
        networks: Collection[str] = (),
        peers: Peers | None = None,
        budget_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._roles = roles
        self._token = token
        self._peers = peers
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._budget_s = budget_s
        self._clock = clock
        self._connecting: set[str] = set()  # URLs that hands are being shaken with
        self._left: set[tuple[str, str | None]] = set()  # those that said goodbye meanwhile

    def warn_if_shut(self, host: str) -> None:
        """
        Args:
            host: that the router listens on.
        """
        if not self._token and host not in _LOOPBACK:
            logger.warning("only workers of this host may announce themselves: %s", _NO_TOKEN)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post(PATH, self.receive)

    async def receive(self, request: web.Request) -> web.Response:
        if self._token and not carries_token(request.headers.get("Authorization"), self._token):
            raise RequestError("announcements must carry the worker token", status=401)
        if not self._token and not self._is_of_this_host(request):
            raise RequestError(f"announcements from other hosts: {_NO_TOKEN}", status=401)
        if self._networks:
            await self._checked(self._sender(request), "who announces")
        try:
            announcement = parse(await request.read())
        except ContractError as error:
            raise RequestError(str(error)) from error
        try:
            await self.hear(await self._pinned(announcement))
        except WorkerError as error:
            raise RequestError(str(error), status=409) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            told = f"{announcement.url} does not answer the router ({describe(error)})"
            raise RequestError(told, status=409) from error
        return web.json_response({"workers": len(self._pool.workers)})

    def _sender(self, request: web.Request) -> str | None:
        """Whom another process of ours has it from, if it has passed the announcement on."""
        if self._peers is not None and self._peers.asks(request):
            return request.headers.get(PASSED_ON, request.remote)
        return request.remote

    def _is_of_this_host(self, request: web.Request) -> bool:
        sender = self._sender(request)
        here = request.get_extra_info("sockname") or ("",)
        return is_loopback(sender) or sender == here[0]

    async def _pinned(self, said: Announcement) -> Announcement:
        """``said`` of an address in the allowed networks: what a name leads to may be changed
        between this check and the handshake, and again before any request.

        Raises:
            WorkerError: its URL is none, or a name that cannot be replaced by an address.
            RequestError: it is not in the allowed networks.
        """
        if not self._networks:
            return said
        if problem := url_problem(said.role, said.url):
            raise WorkerError(problem)
        parts = urlsplit(said.url)
        host = parts.hostname or ""
        addresses = await self._checked(host, "a worker")
        if _is_address(host):
            return said
        if parts.scheme == "https":  # its certificate is the name's
            raise WorkerError(f"{said.url}: where networks are restricted, announce an address")
        # The same one for all processes of this router.
        address = min(addresses, key=lambda one: (one.version, int(one)))
        written = f"[{address}]" if address.version == 6 else address
        url = parts._replace(netloc=f"{written}:{parts.port}").geturl()
        return msgspec.structs.replace(said, url=url)

    async def _checked(self, host: str | None, what: str) -> Sequence[IPv4Address | IPv6Address]:
        """
        Args:
            host: an address, or a name, which must lead nowhere else.

        Raises:
            RequestError: it is not in the allowed networks.
        """
        addresses = await _addresses(host or "")
        for address in addresses:
            if not any(address in network for network in self._networks):
                allowed = ", ".join(map(str, self._networks))
                raise RequestError(f"{what} at {address} is not in {allowed}", status=403)
        return addresses

    async def hear(self, said: Announcement) -> None:
        """Act on one announcement.

        Raises:
            WorkerError: this worker cannot be of this router's.
            aiohttp.ClientError, TimeoutError, OSError: it cannot be reached where it says it is.
        """
        if problem := url_problem(said.role, said.url):
            raise WorkerError(problem)
        worker = self._pool.at(said.url)
        if said.leaving:
            if said.url in self._connecting:
                self._left.add((said.url, said.boot_id))
            if worker is not None and worker.handshake.boot_id in (None, said.boot_id):
                self._goodbye(worker)
        elif worker is None:
            await self._welcome(said)
        elif worker.announced_at_s is None:
            await self._renew(worker, said)
            worker.note_flushes(said.flushes)
        else:
            try:
                await self._renew(worker, said)
            except WorkerError:
                self._pool.leave(worker)  # something else is there now: it may join anew
                raise
            self._note(worker, said)

    async def _renew(self, worker: Worker, said: Announcement) -> None:
        """Make sure that a known worker is what it was.

        Raises:
            WorkerError: it is not, or does not answer.
        """
        if said.role is not worker.role:
            raise WorkerError(f"{said.url} is known as a {worker.role} worker, not {said.role}")
        boot_id = worker.handshake.boot_id
        if worker.alive and boot_id is not None and boot_id != said.boot_id:
            self._pool.mark_dead(worker, "another process has its place")
        if not worker.alive:
            await self._pool.check(worker)
        if not worker.alive:
            raise WorkerError(f"{said.url} does not answer the router, or serves another model")

    async def _welcome(self, said: Announcement) -> None:
        if said.role not in self._roles:
            used = ", ".join(self._roles)
            raise WorkerError(f"this router uses no {said.role} workers, only {used}")
        if said.url in self._connecting:
            return  # the heartbeat before this one is still being answered
        self._connecting.add(said.url)
        try:
            worker = await connect_worker(self._pool.control, said.role, said.url)
        finally:
            self._connecting.discard(said.url)
        boot_id = worker.handshake.boot_id
        if (said.url, boot_id) in self._left:
            self._left.discard((said.url, boot_id))
            return
        if self._pool.at(said.url) is not None:
            return  # found or added meanwhile
        self._note(worker, said)
        self._pool.join(worker)
        logger.info("worker joined: %s %s", worker.role, worker.url)

    def _note(self, worker: Worker, said: Announcement) -> None:
        """Take down what an announced worker says of its load; it is not asked then."""
        worker.announced_at_s, worker.announcement = self._clock(), said
        worker.note_flushes(said.flushes)
        if said.role is Role.DECODE:
            free = said.load.kv_total_tokens - said.load.kv_used_tokens
            load = Load(said.load.running, free, written_at=worker.announced_at_s)
            self._pool.report(worker, load)

    def _goodbye(self, worker: Worker) -> None:
        """No new work for it; what it has in hand it finishes."""
        if worker.announced_at_s is None:
            self._pool.mark_dead(worker, "it said goodbye")
        else:
            self._pool.leave(worker)
            logger.info("worker left: %s %s", worker.role, worker.url)

    def drop_silent(self) -> None:
        """Drop announced workers whose heartbeats have stayed out."""
        now_s = self._clock()
        for worker in list(self._pool.workers):
            if worker.announced_at_s is None or now_s - worker.announced_at_s <= self._budget_s:
                continue
            self._pool.leave(worker)
            logger.warning(
                "worker dropped: %s %s (no heartbeat for %.0f s)",
                worker.role,
                worker.url,
                now_s - worker.announced_at_s,
            )

    async def watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._budget_s / 10)
            self.drop_silent()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _addresses(host: str) -> list[IPv4Address | IPv6Address]:
    """Raises:
    RequestError: it is no address, and no name of one.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        raise RequestError(f"{host!r} leads nowhere: {error}") from error
    addresses = [ipaddress.ip_address(one[4][0]) for one in found]
    return [getattr(one, "ipv4_mapped", None) or one for one in addresses]
