"""Changing which workers get work, while requests are served: add, remove, drain, resume.

``guard.py`` sees to it that only operators do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import aiohttp
import msgspec
from aiohttp import web

from ppd.announcement import PATH
from ppd.contract import Role
from ppd.errors import RequestError, WorkerError

from ..config.options import url_problem
from ..wire.errors import describe
from ..workers.handshake import connect_worker
from ..workers.registry import WorkerRegistry
from ..workers.worker import Worker
from .peer_state import CHANGES, Changes

logger = logging.getLogger("ppd.router.workers")


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    role: Role


class Operations:
    """
    Args:
        roles: of the workers that the router's policy uses.
        changes: as they were taken over.
    """

    def __init__(self, pool: WorkerRegistry, roles: Collection[Role], changes: Changes) -> None:
        self._pool = pool
        self._roles = roles
        self._changes = changes

    def add_routes(self, app: web.Application) -> None:
        one = PATH + "/{id}"
        app.router.add_get(CHANGES, self.changed)
        app.router.add_put(PATH, self.add)
        app.router.add_delete(one, self.remove)
        app.router.add_post(f"{one}/drain", self.drain)
        app.router.add_post(f"{one}/resume", self.resume)

    async def changed(self, request: web.Request) -> web.Response:
        """For a process that is started again."""
        body = msgspec.json.encode(self._changes.shown(self._pool))
        return web.Response(body=body, content_type="application/json")

    async def add(self, request: web.Request) -> web.Response:
        try:
            added = msgspec.json.decode(await request.read(), type=_Added)
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
            return _shown(known)
        try:
            worker = await connect_worker(self._pool.control, added.role, url)
            if (known := self._known(url, added.role)) is not None:  # it has come meanwhile
                return _shown(known)
            self._pool.join(worker)
        except WorkerError as error:
            raise RequestError(str(error), status=409) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestError(f"{url} does not answer ({describe(error)})", status=409) from error
        self._changes.was_added(worker)
        logger.info("worker added: %s %s", worker.role, worker.url)
        return _shown(worker)

    def _known(self, url: str, role: Role) -> Worker | None:
        """Who is added once more: not every process may have heard it the first time."""
        known = self._pool.at(url)
        if known is not None and known.role is not role:
            raise RequestError(
                f"{url} is known already, as a {known.role} worker", status=409, param="role"
            )
        return known

    async def remove(self, request: web.Request) -> web.Response:
        """It gets no new work; what it has in hand it finishes."""
        worker = self._asked(request)
        self._pool.leave(worker)
        self._changes.was_removed(worker)
        logger.info("worker removed: %s %s", worker.role, worker.url)
        return _shown(worker)

    async def drain(self, request: web.Request) -> web.Response:
        """No new work until its process ends or it is resumed; conversations move."""
        worker = self._asked(request)
        worker.draining = True
        self._changes.was_drained(worker)
        logger.info("worker draining: %s %s", worker.role, worker.url)
        return _shown(worker)

    async def resume(self, request: web.Request) -> web.Response:
        worker = self._asked(request)
        worker.draining = False
        self._changes.was_resumed(worker)
        logger.info("worker resumed: %s %s", worker.role, worker.url)
        return _shown(worker)

    def _asked(self, request: web.Request) -> Worker:
        wanted = request.match_info["id"]
        for worker in self._pool.workers:
            if worker.id == wanted:
                return worker
        known = ", ".join(worker.id for worker in self._pool.workers)
        raise RequestError(f"no worker {wanted}; there are {known}", status=404)


def _shown(worker: Worker) -> web.Response:
    return web.json_response(
        {
            "id": worker.id,
            "url": worker.url,
            "role": worker.role,
            "draining": worker.draining,
            "in_flight": worker.in_flight,
        }
    )
