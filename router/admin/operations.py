"""The operators' changes of workers while requests are served: add, remove, drain, resume.

``guard.py`` refuses requests that are not operators'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import aiohttp
import msgspec
from aiohttp import web

from ppd.announcement import PATH
from ppd.contract import Role
from ppd.errors import RequestError, WorkerError

from ..config.options import url_problem
from ..wire.errors import describe
from ..workers.handshake import connect_server
from ..workers.registry import WorkerRegistry
from ..workers.worker import Server
from .peer_state import CHANGES_PATH, WorkerChanges
from .responses import json_response
from .schemas import AddedWorker, WorkerSummary

logger = logging.getLogger("ppd.router.workers")


class Operations:
    """The routes that change workers.

    Args:
        registry: the workers.
        roles: of the workers that the router's policy uses.
        changes: the changes so far, to which new ones are added.
        share: called with a server that was drained or resumed; None: nothing is shared.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        roles: Collection[Role],
        changes: WorkerChanges,
        share: Callable[[Server], None] | None = None,
    ) -> None:
        self._share = share
        self._registry = registry
        self._roles = roles
        self._changes = changes

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to ``app``."""
        worker = PATH + "/{id}"
        app.router.add_get(CHANGES_PATH, self.show_changes)
        app.router.add_put(PATH, self.add)
        app.router.add_delete(worker, self.remove)
        app.router.add_post(f"{worker}/drain", self.drain)
        app.router.add_post(f"{worker}/resume", self.resume)

    async def show_changes(self, request: web.Request) -> web.Response:
        """Return the changes, for a restarted process."""
        return json_response(self._changes.without_lost(self._registry))

    async def add(self, request: web.Request) -> web.Response:
        """Add a worker after a handshake with it; return it if it has been added before."""
        try:
            added = msgspec.json.decode(await request.read(), type=AddedWorker)
        except msgspec.DecodeError as error:
            raise RequestError(f"give url and role of the worker: {error}") from error
        url = added.url.rstrip("/")
        if added.role not in self._roles:
            raise RequestError(
                f"this router uses no {added.role} workers, only {', '.join(self._roles)}",
                param="role",
            )
        if problem := url_problem(added.role, url):
            raise RequestError(problem, param="url")
        if (known := self._known(url, added.role)) is not None:
            return _describe(known)
        try:
            server = await connect_server(self._registry.control, added.role, url)
            if (known := self._known(url, added.role)) is not None:  # added during the handshake
                return _describe(known)
            self._registry.join(server)
        except WorkerError as error:
            raise RequestError(str(error), status=409) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestError(f"{url} does not answer ({describe(error)})", status=409) from error
        self._changes.record_added(server)
        logger.info("worker added: %s %s", server.role, server.url)
        return _describe(server)

    def _known(self, url: str, role: Role) -> Server | None:
        """Return the worker at ``url``, if any.

        Adding a worker twice is no error: the first request may not have reached all processes.

        Raises:
            RequestError: the worker has another role.
        """
        known = self._registry.at(url)
        if known is not None and known.role is not role:
            raise RequestError(
                f"{url} is known already, as a {known.role} worker", status=409, param="role"
            )
        return known

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a worker: it gets no new requests, and those in flight end normally."""
        server = self._worker_of(request)
        self._registry.leave(server)
        self._changes.record_removed(server)
        logger.info("worker removed: %s %s", server.role, server.url)
        return _describe(server)

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a worker: it gets no new requests, and its sessions move to other workers.

        The drain lasts until the worker is resumed or its process ends.
        """
        server = self._worker_of(request)
        server.draining = True
        self._changes.record_drained(server)
        if self._share is not None:
            self._share(server)
        logger.info("worker draining: %s %s", server.role, server.url)
        return _describe(server)

    async def resume(self, request: web.Request) -> web.Response:
        """Send requests to a drained worker again."""
        server = self._worker_of(request)
        server.draining = False
        self._changes.record_resumed(server)
        if self._share is not None:
            self._share(server)
        logger.info("worker resumed: %s %s", server.role, server.url)
        return _describe(server)

    def _worker_of(self, request: web.Request) -> Server:
        worker_id = request.match_info["id"]
        for server in self._registry.servers:
            if server.id == worker_id:
                return server
        known = ", ".join(server.id for server in self._registry.servers)
        raise RequestError(f"no worker {worker_id}; there are {known}", status=404)


def _describe(server: Server) -> web.Response:
    return json_response(
        WorkerSummary(
            id=server.id,
            url=server.url,
            role=server.role,
            draining=server.draining,
            in_flight=server.in_flight,
        )
    )
