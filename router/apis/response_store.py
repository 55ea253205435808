"""Stored responses of the Responses API, held for a while by the process that served them.

A response's name holds the number of that process, and another process on the same port requests
it there. Source of ``GET`` and ``DELETE /v1/responses/{id}``: OpenAI's API reference.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import web

from ppd.errors import RequestError, WorkerError

from ..intake.keys import KeyRing
from ..peers import PEER_HEADER, Peers
from ..shared.responses import SharedResponses
from ..wire.errors import describe
from . import responses
from .request_meter import RequestMeter
from .responses import Messages

logger = logging.getLogger("ppd.router")

BY_NAME = f"{responses.PATH}/{{name}}"
PEER_PATH = "/kept-responses"

_NAME = re.compile(r"resp_([0-9a-f]{1,8})_[0-9a-f]{32}")
_SPARE = 8  # 1/8 of the bytes is freed at once, because a search of all tenants is expensive


class DeletedResponse(msgspec.Struct):
    """The answer to a deletion.

    Attributes:
        id: id of the response that was deleted.
    """

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation, as JSON.

    Attributes:
        response: as the client got it.
        messages: the conversation that ends with it.
    """

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return len(self.response) + len(self.messages)


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant.

    Attributes:
        by_name: expiry in seconds and response by name, the oldest first.
        size: in bytes.
    """

    by_name: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """The responses of this process, bounded in bytes and time.

    If they exceed the bound, the oldest responses of the tenant with the most bytes are dropped.

    Args:
        max_bytes: of all responses.
        ttl_s: lifetime of a response.
        clock: seconds, monotonic.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # The tenant whose expired responses were dropped last is at the end.
        self._tenants: OrderedDict[str, _TenantResponses] = OrderedDict()
        self._size = 0

    def get(self, tenant: str, name: str) -> StoredResponse | None:
        """A tenant's response; None if there is none, or it has expired."""
        responses = self._tenants.get(tenant)
        entry = None if responses is None else responses.by_name.get(name)
        if entry is None:
            return None
        expires_at_s, response = entry
        return response if expires_at_s > self._clock() else None

    def put(self, tenant: str, name: str, response: StoredResponse) -> None:
        """Store a response, unless it alone exceeds the bound."""
        if self._tenants:
            self._drop_expired(next(iter(self._tenants)))
        if response.size > self._max_bytes:
            return
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_name[name] = (self._clock() + self._ttl_s, response)
        responses.size += response.size
        self._size += response.size
        if self._size > self._max_bytes:
            for known in list(self._tenants):
                self._drop_expired(known)
            self._make_room()

    def pop(self, tenant: str, name: str) -> StoredResponse | None:
        """Remove and return a tenant's response; None if there is none, or it has expired."""
        response = self.get(tenant, name)
        if response is not None:
            self._drop(tenant, name)
        return response

    def forget(self, name: str) -> None:
        """Remove a response, whose tenant is not known."""
        for tenant, held in list(self._tenants.items()):
            if name in held.by_name:
                self._drop(tenant, name)

    def _drop(self, tenant: str, name: str) -> None:
        responses = self._tenants[tenant]
        _, response = responses.by_name.pop(name)
        responses.size -= response.size
        self._size -= response.size
        if not responses.by_name:
            del self._tenants[tenant]

    def _make_room(self) -> None:
        largest = [(-responses.size, tenant) for tenant, responses in self._tenants.items()]
        heapify(largest)
        while self._size > self._max_bytes - self._max_bytes // _SPARE:
            tenant = largest[0][1]
            responses = self._tenants[tenant]
            self._drop(tenant, next(iter(responses.by_name)))
            if responses.by_name:
                heapreplace(largest, (-responses.size, tenant))
            else:
                heappop(largest)

    def _drop_expired(self, tenant: str) -> None:
        now_s = self._clock()
        for name, (expires_at_s, _) in list(self._tenants[tenant].by_name.items()):
            if expires_at_s > now_s:
                self._tenants.move_to_end(tenant)
                return
            self._drop(tenant, name)


class StoredResponses:
    """The responses of all processes on the port, and of all routers that share them.

    Args:
        store: the responses of this process.
        control: a session with short timeouts, for requests to the other processes.
        peers: the other processes; None if there are none.
        keys: returns the current keys.
        meter: charges and counts the requests of clients.
        shared: the responses of all routers; None: they are not shared.
    """

    def __init__(
        self,
        store: ResponseStore,
        control: aiohttp.ClientSession,
        peers: Peers | None,
        keys: Callable[[], KeyRing],
        meter: RequestMeter,
        shared: SharedResponses | None = None,
    ) -> None:
        self._shared = shared
        self._store = store
        self._control = control
        self._peers = peers
        self._keys = keys
        self._meter = meter

    def new_name(self) -> str:
        """A new name, which holds the number of this process and cannot be guessed."""
        number = 0 if self._peers is None else self._peers.own
        return f"resp_{number:x}_{secrets.token_hex(16)}"

    def put(self, tenant: str, name: str, response: Mapping[str, Any], messages: Messages) -> None:
        """Store a response and the conversation that ends with it."""
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        self._store.put(tenant, name, stored)
        if self._shared is not None:
            self._shared.put(tenant, name, (stored.response, stored.messages))

    async def find(self, tenant: str, name: str, param: str) -> Messages:
        """The conversation that ends with a response.

        Args:
            tenant: the client's tenant.
            name: of the response.
            param: the field of the request that holds the name.

        Raises:
            RequestError: the tenant has no such response, or it has expired.
            WorkerError: the process that may hold it does not answer.
        """
        data = await self._request("GET", tenant, name, "messages")
        if data is None:
            raise _not_found(name, param, "previous_response_not_found")
        return msgspec.json.decode(data, type=tuple[dict[str, Any], ...])

    async def _request(self, method: str, tenant: str, name: str, part: str) -> bytes | None:
        """Get or delete a response, here, at the process that holds it, or in the shared store.

        Args:
            method: ``GET`` or ``DELETE``.
            tenant: the client's tenant.
            name: of the response.
            part: ``response`` or ``messages``.

        Returns:
            The part of the response, as JSON; None if there is no such response.

        Raises:
            WorkerError: the process that may hold it does not answer.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        shared = self._shared
        if shared is None:
            return await self._of_port(match, method, tenant, name, part)
        try:
            data = await self._of_port(match, method, tenant, name, part)
        except WorkerError:
            data = None  # the store has it, too
        if data is None and (parts := await shared.get(tenant, name)) is not None:
            data = _part(StoredResponse(*parts), part)
        if data is not None and method == "DELETE":
            shared.delete(tenant, name)
        return data

    async def _of_port(
        self, match: re.Match[str], method: str, tenant: str, name: str, part: str
    ) -> bytes | None:
        """Get or delete a response that a process on the port holds.

        Raises:
            WorkerError: the process that may hold it does not answer.
        """
        peers, number = self._peers, int(match[1], 16)
        if peers is None or number == peers.own or number not in peers.urls:
            return self._local(method, tenant, name, part)
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
                reason = f"it answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = describe(error)
        logger.warning("%s was not asked for %s: %s", url, name, reason)
        raise WorkerError(f"the process that has {name} is away")

    def _local(self, method: str, tenant: str, name: str, part: str) -> bytes | None:
        response = (self._store.pop if method == "DELETE" else self._store.get)(tenant, name)
        if response is None:
            return None
        return _part(response, part)

    # -- for clients --------------------------------------------------------------------

    def add_routes(self, app: web.Application) -> None:
        """Add the routes for clients."""
        app.router.add_get(BY_NAME, self._show, allow_head=False)
        app.router.add_delete(BY_NAME, self._delete)

    async def _show(self, request: web.Request) -> web.Response:
        return _json(await self._requested(request))

    async def _delete(self, request: web.Request) -> web.Response:
        await self._requested(request)
        name = request.match_info["name"]
        return _json(msgspec.json.encode(DeletedResponse(name)))

    async def _requested(self, request: web.Request) -> bytes:
        """The response that a client requests; the request is charged and counted."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        name = request.match_info["name"]
        with self._meter.request(BY_NAME, headers):
            tenant = self._keys().tenant(headers)
            data = await self._request(request.method, tenant, name, "response")
            if data is None:
                raise _not_found(name)
            return data

    # -- for peers ----------------------------------------------------------------------

    def add_peer_routes(self, app: web.Application) -> None:
        """Add the routes for the other processes, if there are any."""
        if self._peers is not None:
            app.router.add_route("GET", PEER_PATH, self._serve_peer)
            app.router.add_route("DELETE", PEER_PATH, self._serve_peer)

    async def _serve_peer(self, request: web.Request) -> web.Response:
        assert self._peers is not None
        self._peers.check(request)
        query = request.query
        data = self._local(request.method, query["tenant"], query["name"], query["part"])
        return web.Response(status=404) if data is None else _json(data)


def _part(response: StoredResponse, part: str) -> bytes:
    return response.messages if part == "messages" else response.response


def _not_found(name: str, param: str | None = None, code: str | None = None) -> RequestError:
    message = f"no response {name[:64]!r} is kept here"
    return RequestError(message, status=404, param=param, code=code)


def _json(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/json")
