"""The other router processes on the port, and what operators and workers tell one, told to all."""

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

PASSED_ON = "X-PPD-Passed-On"  # for whom; only a sibling is believed
PEER_HEADER = "X-PPD-Sibling"  # carries the secret
_TELLING = ("POST", "PUT", "DELETE")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Peers:
    """
    Attributes:
        own: this process's number.
        urls: of the others' operator ports, by their numbers.
        secret: that only these processes know.
        tls: what is trusted where they speak https.
    """

    own: int
    urls: Mapping[int, str]
    secret: str = field(repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def ssl(self) -> ssl.SSLContext | bool:
        """As aiohttp takes it."""
        return True if self.tls is None else self.tls

    def asks(self, request: web.Request) -> bool:
        """Whether it is one of them."""
        given = request.headers.get(PEER_HEADER, "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, self.secret.encode())

    def check(self, request: web.Request) -> None:
        """Raises:
        RequestError: it is none of them.
        """
        if not self.asks(request):
            raise RequestError("only for the other processes on this port", status=401)


def forwarding_to_peers(
    control: aiohttp.ClientSession, peers: Peers, untold: Collection[str]
) -> Middleware:
    """Middleware.

    Args:
        untold: paths, as their routes were added, that are no operator's or worker's.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        own = await _own(handler, request)
        resource = request.match_info.route.resource
        path = "/explain/" if resource is None else resource.canonical
        asks = path.startswith("/explain/") or path in untold
        tells = request.method in _TELLING and not asks and not peers.asks(request)
        if isinstance(own, RequestError) and not tells:
            raise own
        if isinstance(own, web.StreamResponse) and (not tells or own.status >= 300):
            return own
        body = await request.read()
        headers = {PASSED_ON: request.remote or "", PEER_HEADER: peers.secret}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        telling = [
            _tell(control, peers, url, request, headers, body) for url in peers.urls.values()
        ]
        told = await asyncio.gather(*telling)
        done = [one for one in told if isinstance(one, bytes)]
        wrong = [why for why in told if isinstance(why, str)]
        if request.method == "POST" and path == ANNOUNCEMENTS:  # which come again
            wrong.clear()
        if wrong:
            message = f"not all processes have done this: {'; '.join(wrong)}"
            return web.Response(
                status=502,
                body=ErrorAnswer(502, message, "router_error").body,
                content_type="application/json",
            )
        if isinstance(own, web.StreamResponse):
            return _together(own, done)
        if not done:
            raise own
        return _together(web.Response(body=done.pop(), content_type="application/json"), done)

    return middleware


async def _own(handler: Handler, request: web.Request) -> web.StreamResponse | RequestError:
    """The answer; or that there is nothing to delete here, which may be different elsewhere: not
    every process may have been told the first time."""
    try:
        return await handler(request)
    except RequestError as error:
        if request.method == "DELETE" and error.status == 404:
            return error
        raise


async def _tell(
    control: aiohttp.ClientSession,
    peers: Peers,
    url: str,
    request: web.Request,
    headers: dict[str, str],
    body: bytes,
) -> bytes | str | None:
    """The other process's answer, or why it does not do it; None: there is nothing to delete."""
    told = f"{request.method} {request.path}"
    try:
        async with control.request(
            request.method,
            url + request.path_qs,
            data=body,
            headers=headers,
            ssl=peers.ssl,
        ) as answer:
            if answer.status < 400:
                return await answer.read()
            if request.method == "DELETE" and answer.status == 404:
                return None
            why = f"{url} did not take {told}: {answer.status} {(await answer.text())[:300]}"
            logger.warning("%s", why)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = f"{url} was not told {told}: {describe(error)}"
        logger.error("%s", why)
    return why


def _together(answer: web.StreamResponse, others: Sequence[bytes]) -> web.StreamResponse:
    """What a worker has under way is told by each process when it has done what it was told."""
    if not isinstance(answer, web.Response) or not isinstance(answer.body, bytes):
        return answer
    shown = orjson.loads(answer.body)
    if isinstance(shown, dict) and "in_flight" in shown:
        shown["in_flight"] += sum(orjson.loads(other)["in_flight"] for other in others)
        answer.body = orjson.dumps(shown)
    return answer


async def ask(control: aiohttp.ClientSession, peers: Peers, url: str, path: str) -> bytes | None:
    """What the process at ``url`` shows there; None if it does not."""
    headers = {PEER_HEADER: peers.secret}
    try:
        async with control.get(url + path, headers=headers, ssl=peers.ssl) as answer:
            if answer.status == 200:
                return await answer.read()
            why = f"it answers {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = describe(error)
    logger.info("%s%s: %s", url, path, why)
    return None
