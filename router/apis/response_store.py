"""What responses have ended with, kept for a while by the process that gave them.

Another process on the same port asks it: a response's name says whose it is. Routes and answers of
``GET`` and ``DELETE /v1/responses/{id}`` are made after OpenAI's API reference.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from ppd.errors import RequestError, WorkerError

from ..intake.keys import KeyRing
from ..peers import PEER_HEADER, Peers
from ..wire.errors import describe
from . import responses
from .request_meter import RequestMeter
from .responses import Messages

logger = logging.getLogger("ppd.router")

BY_NAME = f"{responses.PATH}/{{name}}"
PEER_PATH = "/kept-responses"

_NAME = re.compile(r"resp_([0-9a-f]{1,8})_[0-9a-f]{32}")
_SPARE = 8  # one part in so many is made room for at once: there may be many tenants


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """As JSON: the one is shown, the other continued.

    Attributes:
        response: as the client got it.
        messages: the conversation that ends with it.
    """

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


@dataclass(slots=True)
class _Of:
    """What a tenant has here, the oldest first, each until a time in seconds."""

    kept: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Those of this process. Of whoever has most the oldest go first.

    Args:
        max_bytes: of all of them.
        clock: seconds, monotonic.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._of: OrderedDict[str, _Of] = OrderedDict()  # who was looked through last is last
        self._size = 0

    def get(self, tenant: str, name: str) -> StoredResponse | None:
        of = self._of.get(tenant)
        found = None if of is None else of.kept.get(name)
        return found[1] if found is not None and found[0] > self._clock() else None

    def put(self, tenant: str, name: str, kept: StoredResponse) -> None:
        """One that is larger than all may be is not kept."""
        if self._of:
            self._drop_old(next(iter(self._of)))
        if kept.size > self._max_bytes:
            return
        of = self._of.setdefault(tenant, _Of())
        of.kept[name] = (self._clock() + self._ttl_s, kept)
        of.size += kept.size
        self._size += kept.size
        if self._size > self._max_bytes:
            for one in list(self._of):
                self._drop_old(one)
            self._make_room()

    def pop(self, tenant: str, name: str) -> StoredResponse | None:
        kept = self.get(tenant, name)
        if kept is not None:
            self._drop(tenant, name)
        return kept

    def _drop(self, tenant: str, name: str) -> None:
        of = self._of[tenant]
        _, kept = of.kept.pop(name)
        of.size -= kept.size
        self._size -= kept.size
        if not of.kept:
            del self._of[tenant]

    def _make_room(self) -> None:
        largest = [(-of.size, tenant) for tenant, of in self._of.items()]
        heapify(largest)
        while self._size > self._max_bytes - self._max_bytes // _SPARE:
            tenant = largest[0][1]
            of = self._of[tenant]
            self._drop(tenant, next(iter(of.kept)))
            if of.kept:
                heapreplace(largest, (-of.size, tenant))
            else:
                heappop(largest)

    def _drop_old(self, tenant: str) -> None:
        now_s = self._clock()
        for name, (until_s, _) in list(self._of[tenant].kept.items()):
            if until_s > now_s:
                self._of.move_to_end(tenant)
                return
            self._drop(tenant, name)


class StoredResponses:
    """
    Args:
        control: with short timeouts, for the other processes.
        siblings: None: there are no others.
        keys: those in force.
    """

    def __init__(
        self,
        store: ResponseStore,
        control: aiohttp.ClientSession,
        peers: Peers | None,
        keys: Callable[[], KeyRing],
        counted: RequestMeter,
    ) -> None:
        self._store = store
        self._control = control
        self._peers = peers
        self._keys = keys
        self._counted = counted

    def new_name(self) -> str:
        number = 0 if self._peers is None else self._peers.own
        return f"resp_{number:x}_{secrets.token_hex(16)}"

    def keep(self, tenant: str, name: str, response: Mapping[str, Any], messages: Messages) -> None:
        kept = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        self._store.put(tenant, name, kept)

    async def find(self, tenant: str, name: str, param: str) -> Messages:
        """What a response ended with.

        Args:
            param: of the request, that holds the name.

        Raises:
            RequestError: this tenant has no such response, or not any more.
            WorkerError: the process that may have it does not answer.
        """
        data = await self._have("GET", tenant, name, "messages")
        if data is None:
            raise _unknown(name, param, "previous_response_not_found")
        return msgspec.json.decode(data, type=tuple[dict[str, Any], ...])

    async def _have(self, method: str, tenant: str, name: str, part: str) -> bytes | None:
        """``GET`` or ``DELETE``; that part of it."""
        known = _NAME.fullmatch(name)
        if known is None:
            return None
        peers, number = self._peers, int(known[1], 16)
        if peers is None or number == peers.own or number not in peers.urls:
            return self._own(method, tenant, name, part)
        url = peers.urls[number]
        try:
            async with self._control.request(
                method,
                url + PEER_PATH,
                params={"tenant": tenant, "name": name, "part": part},
                headers={PEER_HEADER: peers.secret},
                ssl=peers.ssl,
            ) as answer:
                if answer.status == 404:
                    return None
                if answer.status == 200:
                    return await answer.read()
                why = f"it answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = describe(error)
        logger.warning("%s was not asked for %s: %s", url, name, why)
        raise WorkerError(f"the process that has {name} is away")

    def _own(self, method: str, tenant: str, name: str, part: str) -> bytes | None:
        kept = (self._store.get if method == "GET" else self._store.pop)(tenant, name)
        if kept is None:
            return None
        return kept.messages if part == "messages" else kept.response

    # -- for clients --------------------------------------------------------------------

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(BY_NAME, self._show)
        app.router.add_delete(BY_NAME, self._delete)

    async def _show(self, request: web.Request) -> web.Response:
        return _json(await self._asked(request))

    async def _delete(self, request: web.Request) -> web.Response:
        await self._asked(request)
        name = request.match_info["name"]
        told: Mapping[str, object] = {"id": name, "object": "response", "deleted": True}
        return _json(msgspec.json.encode(told))

    async def _asked(self, request: web.Request) -> bytes:
        """The response, as the client got it; it is charged and counted that somebody asks."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        name = request.match_info["name"]
        with self._counted.request(BY_NAME, headers):
            tenant = self._keys().tenant(headers)
            data = await self._have(request.method, tenant, name, "response")
            if data is None:
                raise _unknown(name)
            return data

    # -- for siblings -------------------------------------------------------------------

    def add_peer_routes(self, app: web.Application) -> None:
        if self._peers is not None:
            app.router.add_route("GET", PEER_PATH, self._hand_out)
            app.router.add_route("DELETE", PEER_PATH, self._hand_out)

    async def _hand_out(self, request: web.Request) -> web.Response:
        assert self._peers is not None
        self._peers.check(request)
        asked = request.query
        found = self._own(request.method, asked["tenant"], asked["name"], asked["part"])
        return web.Response(status=404) if found is None else _json(found)


def _unknown(name: str, param: str | None = None, code: str | None = None) -> RequestError:
    told = f"no response {name[:64]!r} is kept here"
    return RequestError(told, status=404, param=param, code=code)


def _json(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/json")
