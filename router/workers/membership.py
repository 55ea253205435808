"""Workers that announce themselves: they join, renew, leave, and are dropped when silent.

An announcement is a hint. The router performs a handshake with an announced worker before it sends
work there, as with workers given at start. A shared secret authenticates announcements.
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

from ppd.announcement import PATH, Acknowledgement, Announcement, parse
from ppd.contract import Role, WorkerLoad
from ppd.errors import ContractError, RequestError, WorkerError

from ..config.options import url_problem
from ..peers import PASSED_ON, Peers
from ..wire.access import carries_token, is_loopback
from ..wire.errors import describe
from .handshake import connect_server
from .registry import WorkerRegistry
from .sglang import Load
from .worker import Server

logger = logging.getLogger("ppd.router.workers")

_NO_TOKEN = "set $PPD_WORKER_TOKEN here and at the workers"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Membership:
    """Handles the announcements of workers.

    Args:
        registry: the workers of the router.
        roles: roles that the router's policy uses.
        token: the secret that announcements must carry. If it is empty, they must come from this
            host, or through a proxy on it.
        networks: announcements must come from these networks and name addresses in them; empty
            for any network.
        peers: other processes of the router, which pass announcements on; None if there are none.
        budget_s: a worker whose last announcement is older is dropped.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        *,
        roles: Collection[Role],
        token: str,
        networks: Collection[str] = (),
        peers: Peers | None = None,
        budget_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._roles = roles
        self._token = token
        self._peers = peers
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._budget_s = budget_s
        self._clock = clock
        self._connecting: set[str] = set()  # URLs with a handshake under way
        # URL and boot_id of workers that announced their leave during that handshake.
        self._left: set[tuple[str, str | None]] = set()

    def warn_if_local_only(self, host: str) -> None:
        """Log a warning if the router accepts announcements from its own host only.

        Args:
            host: the host that the router listens on.
        """
        if not self._token and host not in _LOOPBACK:
            logger.warning("only workers of this host may announce themselves: %s", _NO_TOKEN)

    def add_routes(self, app: web.Application) -> None:
        """Add the route of announcements."""
        app.router.add_post(PATH, self.receive)

    async def receive(self, request: web.Request) -> web.Response:
        """Handle the request of one announcement.

        Raises:
            RequestError: the sender is not authenticated (401) or not in the allowed networks
                (403), the announcement is malformed (400), or the worker cannot join (409).
        """
        if self._token and not carries_token(request.headers.get("Authorization"), self._token):
            raise RequestError("announcements must carry the worker token", status=401)
        if not self._token and not self._is_from_this_host(request):
            raise RequestError(f"announcements from other hosts: {_NO_TOKEN}", status=401)
        if self._networks:
            await self._allowed_addresses(self._sender(request), "the sender")
        try:
            announcement = parse(await request.read())
        except ContractError as error:
            raise RequestError(str(error)) from error
        try:
            await self.handle(await self._with_address(announcement))
        except WorkerError as error:
            raise RequestError(str(error), status=409) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{announcement.url} does not answer the router ({describe(error)})"
            raise RequestError(message, status=409) from error
        body = msgspec.json.encode(Acknowledgement(len(self._registry.servers)))
        return web.Response(body=body, content_type="application/json")

    def _sender(self, request: web.Request) -> str | None:
        """The address of the worker, also if a peer has passed its announcement on."""
        if self._peers is not None and self._peers.asks(request):
            return request.headers.get(PASSED_ON, request.remote)
        return request.remote

    def _is_from_this_host(self, request: web.Request) -> bool:
        if self._peers is not None and self._peers.asks(request):
            return True  # it has checked the sender
        sender = request.remote
        local = request.get_extra_info("sockname") or ("",)
        return is_loopback(sender) or sender == local[0]

    async def _with_address(self, announcement: Announcement) -> Announcement:
        """The announcement with an allowed address in its URL in place of a host name.

        The address of a name could change between this check and the handshake, and again before
        any request.

        Raises:
            WorkerError: its URL is malformed, or its name cannot be replaced by an address.
            RequestError: its address is not in the allowed networks.
        """
        if not self._networks:
            return announcement
        if problem := url_problem(announcement.role, announcement.url):
            raise WorkerError(problem)
        parts = urlsplit(announcement.url)
        host = parts.hostname or ""
        addresses = await self._allowed_addresses(host, "a worker")
        if _is_address(host):
            return announcement
        if parts.scheme == "https":  # the certificate is valid for the name only
            raise WorkerError(
                f"{announcement.url}: where networks are restricted, announce an address"
            )
        # All processes of this router choose the same address.
        address = min(addresses, key=lambda address: (address.version, int(address)))
        written = f"[{address}]" if address.version == 6 else address
        url = parts._replace(netloc=f"{written}:{parts.port}").geturl()
        return msgspec.structs.replace(announcement, url=url)

    async def _allowed_addresses(
        self, host: str | None, subject: str
    ) -> Sequence[IPv4Address | IPv6Address]:
        """The addresses of a host, which must all be in the allowed networks.

        Args:
            host: an address or a name.
            subject: the subject of the error message.

        Raises:
            RequestError: an address is not in the allowed networks.
        """
        addresses = await _addresses(host or "")
        for address in addresses:
            if not any(address in network for network in self._networks):
                allowed = ", ".join(map(str, self._networks))
                raise RequestError(f"{subject} at {address} is not in {allowed}", status=403)
        return addresses

    async def handle(self, announcement: Announcement) -> None:
        """Handle one announcement: the worker joins, renews its membership, or leaves.

        Raises:
            WorkerError: the worker cannot join this router.
            aiohttp.ClientError, TimeoutError, OSError: it cannot be reached at the announced URL.
        """
        if problem := url_problem(announcement.role, announcement.url):
            raise WorkerError(problem)
        server = self._registry.at(announcement.url)
        if announcement.leaving:
            if announcement.url in self._connecting:
                self._left.add((announcement.url, announcement.boot_id))
            if server is not None and server.handshake.boot_id in (None, announcement.boot_id):
                self._remove(server)
        elif server is None:
            await self._add(announcement)
        elif server.announced_at_s is None:
            await self._check_known(server, announcement)
            server.note_flushes(announcement.flushes)
        else:
            try:
                await self._check_known(server, announcement)
            except WorkerError:
                # Another server may have its URL, and may join.
                self._registry.leave(server, stays_drained=True)
                raise
            self._record(server, announcement)

    async def _check_known(self, server: Server, announcement: Announcement) -> None:
        """Check that a known server still has its role, and is alive.

        Raises:
            WorkerError: it has another role, or does not answer.
        """
        if announcement.role is not server.role:
            raise WorkerError(
                f"{announcement.url} is known as a {server.role} worker, not {announcement.role}"
            )
        boot_id = server.handshake.boot_id
        if server.alive and boot_id is not None and boot_id != announcement.boot_id:
            self._registry.mark_dead(server, "another process has its place")
        if not server.alive:
            await self._registry.check(server)
        if not server.alive:
            raise WorkerError(
                f"{announcement.url} does not answer the router, or serves another model"
            )

    async def _add(self, announcement: Announcement) -> None:
        """Perform the handshake with an announced worker, and add it to the registry."""
        url = announcement.url
        if announcement.role not in self._roles:
            used = ", ".join(self._roles)
            raise WorkerError(f"this router uses no {announcement.role} workers, only {used}")
        if url in self._connecting:
            return  # the previous announcement is still being handled
        self._connecting.add(url)
        try:
            server = await connect_server(self._registry.control, announcement.role, url)
        finally:
            self._connecting.discard(url)
        boot_id = server.handshake.boot_id
        if (url, boot_id) in self._left:
            self._left.discard((url, boot_id))
            return
        if self._registry.at(url) is not None:
            return  # it was discovered or added during the handshake
        self._record(server, announcement)
        self._registry.join(server)
        logger.info("worker joined: %s %s", server.role, server.url)

    def _record(self, server: Server, announcement: Announcement) -> None:
        """Record an announcement and its loads; announced loads are not requested."""
        at_s = self._clock()
        server.announced_at_s, server.announcement = at_s, announcement
        server.note_flushes(announcement.flushes)
        if announcement.role is Role.DECODE and server.announces_load:
            loads = announcement.loads_of_ranks
            self._registry.report(server, [_reported(load, at_s) for load in loads])

    def _remove(self, server: Server) -> None:
        """Send a leaving server no new work; its open legs end by themselves."""
        if server.announced_at_s is None:
            self._registry.mark_dead(server, "it announced that it leaves")
        else:
            self._registry.leave(server, stays_drained=True)
            logger.info("worker left: %s %s", server.role, server.url)

    def drop_silent(self) -> None:
        """Drop announced servers whose last announcement is too old."""
        now_s = self._clock()
        for server in list(self._registry.servers):
            if server.announced_at_s is None or now_s - server.announced_at_s <= self._budget_s:
                continue
            self._registry.leave(server, stays_drained=True)
            logger.warning(
                "worker dropped: %s %s (no heartbeat for %.0f s)",
                server.role,
                server.url,
                now_s - server.announced_at_s,
            )

    async def watch_forever(self) -> None:
        """Drop silent servers again and again."""
        while True:
            await asyncio.sleep(self._budget_s / 10)
            self.drop_silent()


def _reported(load: WorkerLoad, at_s: float) -> Load:
    return Load(load.running, load.kv_total_tokens - load.kv_used_tokens, written_at_s=at_s)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _addresses(host: str) -> list[IPv4Address | IPv6Address]:
    """The addresses of a host; an IPv4-mapped IPv6 address counts as IPv4.

    Raises:
        RequestError: the host is no address, and no name that resolves to one.
    """
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        raise RequestError(f"{host!r} does not resolve: {error}") from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in resolved]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]
