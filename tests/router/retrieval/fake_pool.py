"""A fake pool with scripted answers, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from tests.apps import serving_app

Hits = Callable[[dict[str, Any]], Sequence[tuple[str, float, str]]]
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def nothing(_body: dict[str, Any]) -> list[tuple[str, float, str]]:
    """No hits."""
    return []


@dataclass(slots=True, eq=False)
class FakePool:
    """A pool whose searches are scripted.

    Attributes:
        hits: returns (id, score, text) of each hit of a search.
        script: answers searches in place of ``hits``.
        degraded: whether answers say that the deadline ended the search.
        metric: of the scores.
        url: base URL while it serves.
        searches: the bodies of all searches so far, with their collections.
        arrived: set when a search arrives.
    """

    hits: Hits = nothing
    script: Answer | None = None
    degraded: bool = False
    metric: str = "cosine"
    url: str = ""
    searches: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def _search(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        body["collection"] = request.match_info["name"]
        self.searches.append(body)
        self.arrived.set()
        if self.script is not None:
            return await self.script(request, body)
        hits = [
            {"id": name, "score": score, "text": text, "metadata": None}
            for name, score, text in self.hits(body)[: body["limit"]]
        ]
        result = {"hits": hits, "degraded": self.degraded}
        return web.json_response({"results": [result], "metric": self.metric, "took_ms": 1.0})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakePool]:
        """Serve while the context is open."""
        app = web.Application()
        app.router.add_post("/v1/collections/{name}/search", self._search)
        async with serving_app(app, handler_cancellation=True, shutdown_timeout=0.05) as self.url:
            yield self
