"""What operators and workers tell one router process, told to the others too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from .apis.passthrough import PASSED_ON as TO_WORKERS
from .workers.handshake import describe

logger = logging.getLogger("ppd.router")

PASSED_ON = "X-PPD-Passed-On"  # and for whom
_TELLING = ("POST", "PUT", "DELETE")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def telling_siblings(control: aiohttp.ClientSession, siblings: Sequence[str]) -> Middleware:
    """Middleware.

    Args:
        siblings: base URLs of the others' operator ports.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        resource = request.match_info.route.resource
        path = "/explain/" if resource is None else resource.canonical
        asks = path.startswith("/explain/") or path in TO_WORKERS
        tells = request.method in _TELLING and not asks
        if tells and answer.status < 300 and PASSED_ON not in request.headers:
            body = await request.read()
            headers = {PASSED_ON: request.remote or ""}
            if "Authorization" in request.headers:
                headers["Authorization"] = request.headers["Authorization"]
            await asyncio.gather(*(_tell(control, url, request, headers, body) for url in siblings))
        return answer

    return middleware


async def _tell(
    control: aiohttp.ClientSession,
    url: str,
    request: web.Request,
    headers: dict[str, str],
    body: bytes,
) -> None:
    told = f"{request.method} {request.path}"
    try:
        async with control.request(
            request.method, url + request.path_qs, data=body, headers=headers
        ) as answer:
            if answer.status >= 400:
                why = (await answer.text())[:300]
                logger.warning("%s did not take %s: %d %s", url, told, answer.status, why)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.error("%s was not told %s: %s", url, told, describe(error))
