"""The other router processes on the port, and what operators and workers tell one, told to all."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from ppd.announcement import PATH as ANNOUNCEMENTS
from ppd.errors import RequestError

from .answers import ErrorAnswer
from .workers.handshake import describe

logger = logging.getLogger("ppd.router")

PASSED_ON = "X-PPD-Passed-On"  # for whom; only a sibling is believed
SIBLING = "X-PPD-Sibling"  # carries the secret
_TELLING = ("POST", "PUT", "DELETE")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Siblings:
    """
    Attributes:
        own: this process's number.
        urls: of the others' operator ports, by their numbers.
        secret: that only these processes know.
    """

    own: int
    urls: Mapping[int, str]
    secret: str = field(repr=False)

    def asks(self, request: web.Request) -> bool:
        """Whether it is one of them."""
        given = request.headers.get(SIBLING, "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, self.secret.encode())

    def check(self, request: web.Request) -> None:
        """Raises:
        RequestError: it is none of them.
        """
        if not self.asks(request):
            raise RequestError("only for the other processes on this port", status=401)


def telling_siblings(
    control: aiohttp.ClientSession, siblings: Siblings, untold: Collection[str]
) -> Middleware:
    """Middleware.

    Args:
        untold: paths, as their routes were added, that are no operator's or worker's.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        resource = request.match_info.route.resource
        path = "/explain/" if resource is None else resource.canonical
        asks = path.startswith("/explain/") or path in untold
        tells = request.method in _TELLING and not asks
        if not tells or answer.status >= 300 or siblings.asks(request):
            return answer
        body = await request.read()
        headers = {PASSED_ON: request.remote or "", SIBLING: siblings.secret}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        told = [_tell(control, url, request, headers, body) for url in siblings.urls.values()]
        wrong = [why for why in await asyncio.gather(*told) if why is not None]
        if not wrong or path == ANNOUNCEMENTS:  # which come again
            return answer
        message = f"this is done here, but {'; '.join(wrong)}"
        return web.Response(
            status=502,
            body=ErrorAnswer(502, message, "router_error").body,
            content_type="application/json",
        )

    return middleware


async def _tell(
    control: aiohttp.ClientSession,
    url: str,
    request: web.Request,
    headers: dict[str, str],
    body: bytes,
) -> str | None:
    """Why the other process does not do it."""
    told = f"{request.method} {request.path}"
    try:
        async with control.request(
            request.method, url + request.path_qs, data=body, headers=headers
        ) as answer:
            if answer.status < 400:
                return None
            why = f"{url} did not take {told}: {answer.status} {(await answer.text())[:300]}"
            logger.warning("%s", why)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = f"{url} was not told {told}: {describe(error)}"
        logger.error("%s", why)
    return why
