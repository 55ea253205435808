"""What responses have ended with, kept for a while by the process that gave them.

Another process on the same port asks it: a response's name says whose it is. Routes and answers of
``GET`` and ``DELETE /v1/responses/{id}`` are made after OpenAI's API reference.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from ppd.errors import RequestError, WorkerError

from ..intake.keys import KeyRing
from ..siblings import SIBLING, Siblings
from ..workers.handshake import describe
from . import responses

BY_NAME = f"{responses.PATH}/{{name}}"
AMONG_SIBLINGS = "/kept-responses"


class Kept(msgspec.Struct, frozen=True):
    """Attributes:
    response: as the client got it.
    messages: the conversation that ends with it.
    """

    response: dict[str, Any]
    messages: tuple[dict[str, Any], ...]


class Shelf:
    """Those of this process; the oldest go first.

    Args:
        most_bytes: of all of them, as JSON.
        clock: seconds, monotonic.
    """

    def __init__(self, most_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._most_bytes = most_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, tenant: str, name: str) -> bytes | None:
        self._drop_old()
        found = self._kept.get((tenant, name))
        return None if found is None else found[1]

    def put(self, tenant: str, name: str, data: bytes) -> None:
        self._kept[tenant, name] = (self._clock() + self._ttl_s, data)
        self._bytes += len(data)
        self._drop_old()

    def pop(self, tenant: str, name: str) -> bytes | None:
        data = self.get(tenant, name)
        if data is not None:
            del self._kept[tenant, name]
            self._bytes -= len(data)
        return data

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._kept:
            until_s, data = next(iter(self._kept.values()))
            if until_s > now_s and self._bytes <= self._most_bytes:
                return
            self._kept.popitem(last=False)
            self._bytes -= len(data)


class KeptResponses:
    """
    Args:
        control: with short timeouts, for the other processes.
        siblings: None: there are no others.
        keys: those in force.
    """

    def __init__(
        self,
        shelf: Shelf,
        control: aiohttp.ClientSession,
        siblings: Siblings | None,
        keys: Callable[[], KeyRing],
    ) -> None:
        self._shelf = shelf
        self._control = control
        self._siblings = siblings
        self._keys = keys

    def new_name(self) -> str:
        number = 0 if self._siblings is None else self._siblings.own
        return f"resp_{number:x}_{secrets.token_hex(16)}"

    def keep(self, tenant: str, name: str, kept: Kept) -> None:
        self._shelf.put(tenant, name, msgspec.json.encode(kept))

    async def find(self, tenant: str, name: str, param: str | None = None) -> Kept:
        """
        Args:
            param: of the request, that holds the name.

        Raises:
            RequestError: this tenant has no such response, or not any more.
            WorkerError: the process that may have it does not answer.
        """
        return _decoded(await self._have("GET", tenant, name), name, param)

    async def _have(self, method: str, tenant: str, name: str) -> bytes | None:
        """``GET`` or ``DELETE``; its data."""
        siblings, number = self._siblings, _number(name)
        if siblings is None or number == siblings.own or number not in siblings.urls:
            return self._own(method, tenant, name)
        url = siblings.urls[number]
        try:
            async with self._control.request(
                method,
                url + AMONG_SIBLINGS,
                params={"tenant": tenant, "name": name},
                headers={SIBLING: siblings.secret},
            ) as answer:
                if answer.status == 404:
                    return None
                answer.raise_for_status()
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerError(f"the process that has {name} is away: {describe(error)}") from error

    def _own(self, method: str, tenant: str, name: str) -> bytes | None:
        return (self._shelf.get if method == "GET" else self._shelf.pop)(tenant, name)

    # -- for clients --------------------------------------------------------------------

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(BY_NAME, self._show)
        app.router.add_delete(BY_NAME, self._delete)

    async def _show(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        kept = await self.find(self._tenant(request), name)
        return _json(msgspec.json.encode(kept.response))

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        _decoded(await self._have("DELETE", self._tenant(request), name), name, None)
        told: Mapping[str, object] = {"id": name, "object": "response", "deleted": True}
        return _json(msgspec.json.encode(told))

    def _tenant(self, request: web.Request) -> str:
        headers = {name.lower(): value for name, value in request.headers.items()}
        return self._keys().tenant(headers)

    # -- for siblings -------------------------------------------------------------------

    def add_sibling_routes(self, app: web.Application) -> None:
        if self._siblings is not None:
            app.router.add_route("GET", AMONG_SIBLINGS, self._hand_out)
            app.router.add_route("DELETE", AMONG_SIBLINGS, self._hand_out)

    async def _hand_out(self, request: web.Request) -> web.Response:
        assert self._siblings is not None
        given = request.headers.get(SIBLING, "")
        if not hmac.compare_digest(given.encode(), self._siblings.secret.encode()):
            raise RequestError("only for the other processes on this port", status=401)
        found = self._own(request.method, request.query["tenant"], request.query["name"])
        return web.Response(status=404) if found is None else _json(found)


def _number(name: str) -> int:
    """Of the process; -1 if the name is not one of ours."""
    head, _, rest = name.removeprefix("resp_").partition("_")
    try:
        return int(head, 16) if rest else -1
    except ValueError:
        return -1


def _decoded(data: bytes | None, name: str, param: str | None) -> Kept:
    if data is None:
        raise RequestError(
            f"no response {name!r} is kept here",
            status=404,
            param=param,
            code="previous_response_not_found" if param else None,
        )
    return msgspec.json.decode(data, type=Kept)


def _json(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/json")
