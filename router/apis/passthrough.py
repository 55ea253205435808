"""What is passed on to one worker as it comes: embeddings, and what only a tokenizer answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import aiohttp
from aiohttp import web

from ppd.contract import Role
from ppd.errors import Overloaded, WorkerError

from ..intake.keys import KeyRing
from ..workers.cluster import WorkerPool
from ..workers.handshake import describe

EMBEDDINGS = "/v1/embeddings"
PASSED_ON = (EMBEDDINGS, "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")


class Passthrough:
    """
    Args:
        client: with the timeouts that such an answer may take.
        embedding: base URLs of workers that serve an embedding model; () if none do: what is
            asked of them is a decode worker's to answer, or to refuse.
        keys: those in force.
        charge: a request with these headers, or refuses it.
        ended: told of a request's path and outcome.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        pool: WorkerPool,
        embedding: Sequence[str],
        keys: Callable[[], KeyRing],
        charge: Callable[[Mapping[str, str]], None],
        ended: Callable[[str, str], None],
    ) -> None:
        self._client = client
        self._pool = pool
        self._embedding = embedding
        self._keys = keys
        self._charge = charge
        self._ended = ended
        self._turn = count()

    def add_routes(self, app: web.Application) -> None:
        for path in PASSED_ON:
            app.router.add_post(path, self.pass_on)

    async def pass_on(self, request: web.Request) -> web.Response:
        outcome = "rejected"
        try:
            headers = {name.lower(): value for name, value in request.headers.items()}
            self._charge(headers)
            outcome = "worker_error"
            answer = await self._answer(request, headers)
            outcome = "ok" if answer.status < 400 else "rejected"
            return answer
        except asyncio.CancelledError:
            outcome = "disconnected"
            raise
        except Overloaded:
            outcome = "overloaded"
            raise
        finally:
            self._ended(request.path, outcome)

    async def _answer(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        keys = self._keys()
        url = self._worker(request.path)
        try:
            async with self._client.post(
                url + request.path,
                data=await request.read(),
                headers={**keys.forwarded(headers), "Content-Type": "application/json"},
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerError(f"{url} did not answer: {describe(error)}") from error

    def _worker(self, path: str) -> str:
        if path == EMBEDDINGS and self._embedding:
            return self._embedding[next(self._turn) % len(self._embedding)]
        replicas = bool(self._pool.of(Role.REPLICA))
        return self._pool.pick(Role.REPLICA if replicas else Role.DECODE, None).url
