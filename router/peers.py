"""Requests between the router processes on one port.

A request of an operator or a worker that changes state reaches one process. That process forwards
it to all others.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from ppd.announcement import PATH as ANNOUNCEMENTS
from ppd.errors import RequestError

from .answers import ErrorAnswer
from .wire.errors import describe

logger = logging.getLogger("ppd.router")

PASSED_ON = "X-PPD-Passed-On"  # the sender's address; only trusted from a peer
PEER_HEADER = "X-PPD-Sibling"  # the secret
READING = ("/explain/", "/decide")  # POST requests of operators that change nothing
_CHANGE_METHODS = ("POST", "PUT", "DELETE")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Peers:
    """The other router processes on the port, and the authentication between them.

    Attributes:
        own: number of this process.
        urls: base URLs of the others' admin ports, by number.
        secret: that requests between the processes carry.
        tls: for https to the others; None: http.
    """

    own: int
    urls: Mapping[int, str]
    secret: str = field(repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def ssl(self) -> ssl.SSLContext | bool:
        """The ``ssl`` argument of aiohttp's requests."""
        return True if self.tls is None else self.tls

    def asks(self, request: web.Request) -> bool:
        """Return whether a request is a peer's."""
        given = request.headers.get(PEER_HEADER, "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, self.secret.encode())

    def check(self, request: web.Request) -> None:
        """Check that a request is a peer's.

        Raises:
            RequestError: it is not.
        """
        if not self.asks(request):
            raise RequestError("only for the other processes on this port", status=401)


def forwarding_to_peers(
    control: aiohttp.ClientSession, peers: Peers, local_paths: Collection[str]
) -> Middleware:
    """Return a middleware that forwards changes by operators and workers to all peers.

    Args:
        control: client session for the forwarded requests.
        peers: that requests are forwarded to.
        local_paths: paths of clients, as their routes were added, which are not forwarded.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        own = await _handle(handler, request)
        resource = request.match_info.route.resource
        path = READING[0] if resource is None else resource.canonical
        is_local = path.startswith(READING) or path in local_paths
        forwards = request.method in _CHANGE_METHODS and not is_local and not peers.asks(request)
        if isinstance(own, RequestError) and not forwards:
            raise own
        if isinstance(own, web.StreamResponse) and (not forwards or own.status >= 300):
            return own
        body = await request.read()
        headers = {PASSED_ON: request.remote or "", PEER_HEADER: peers.secret}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        results = await asyncio.gather(
            *(_forward(control, peers, url, request, headers, body) for url in peers.urls.values())
        )
        done = [result.body for result in results if isinstance(result, _Done)]
        failures = [result.reason for result in results if isinstance(result, _Failed)]
        if request.method == "POST" and path == ANNOUNCEMENTS:  # which are repeated
            failures.clear()
        if failures:
            message = f"not all processes have done this: {'; '.join(failures)}"
            return web.Response(
                status=502,
                body=ErrorAnswer(502, message, "router_error").body,
                content_type="application/json",
            )
        if isinstance(own, web.StreamResponse):
            return _combined(own, done)
        if not done:
            raise own
        return _combined(web.Response(body=done.pop(), content_type="application/json"), done)

    return middleware


async def _handle(handler: Handler, request: web.Request) -> web.StreamResponse | RequestError:
    """Return this process's response, or the error that there is nothing to delete.

    The latter does not end the request: another process may have what this one never got.
    """
    try:
        return await handler(request)
    except RequestError as error:
        if request.method == "DELETE" and error.status == 404:
            return error
        raise


@dataclass(frozen=True, slots=True)
class _Done:
    """A peer has done what was requested."""

    body: bytes


@dataclass(frozen=True, slots=True)
class _Failed:
    """A peer has not done what was requested."""

    reason: str


async def _forward(
    control: aiohttp.ClientSession,
    peers: Peers,
    url: str,
    request: web.Request,
    headers: dict[str, str],
    body: bytes,
) -> _Done | _Failed | None:
    """Send a request to a peer; None if the peer has nothing to delete."""
    what = f"{request.method} {request.path}"
    try:
        async with control.request(
            request.method,
            url + request.path_qs,
            data=body,
            headers=headers,
            ssl=peers.ssl,
        ) as response:
            if response.status < 400:
                return _Done(await response.read())
            if request.method == "DELETE" and response.status == 404:
                return None
            text = (await response.text())[:300]
            reason = f"{url} refused {what}: {response.status} {text}"
            logger.warning("%s", reason)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = f"{url} could not be reached for {what}: {describe(error)}"
        logger.error("%s", reason)
    return _Failed(reason)


def _combined(response: web.StreamResponse, others: Sequence[bytes]) -> web.StreamResponse:
    """Return the response with the sum of all processes' requests in flight to the worker."""
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return response
    fields = orjson.loads(response.body)
    if isinstance(fields, dict) and "in_flight" in fields:
        fields["in_flight"] += sum(orjson.loads(other)["in_flight"] for other in others)
        response.body = orjson.dumps(fields)
    return response


async def fetch(control: aiohttp.ClientSession, peers: Peers, url: str, path: str) -> bytes | None:
    """Return the body of a peer's response to a GET request; None if the request fails."""
    headers = {PEER_HEADER: peers.secret}
    try:
        async with control.get(url + path, headers=headers, ssl=peers.ssl) as response:
            if response.status == 200:
                return await response.read()
            reason = f"it answers {response.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = describe(error)
    logger.info("%s%s: %s", url, path, reason)
    return None
