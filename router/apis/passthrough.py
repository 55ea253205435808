"""What is passed on to one worker: embeddings, and what only a tokenizer answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import aiohttp
from aiohttp import web

from ppd.contract import Role
from ppd.errors import WorkerError
from ppd.outcome import Outcome

from ..intake.keys import KeyRing
from ..intake.requests import json_bytes, json_object
from ..intake.scrub import isolate, without_routing
from ..wire.errors import describe
from ..workers.registry import WorkerRegistry
from .request_meter import RequestMeter

EMBEDDINGS = "/v1/embeddings"
PASSED_ON = (EMBEDDINGS, "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
_PASSED_BACK = ("Retry-After",)


class Passthrough:
    """
    Args:
        client: with the timeouts that such an answer may take.
        embedding: base URLs of workers that serve an embedding model; () if none do: what is
            asked of them is a decode worker's to answer, or to refuse.
        keys: those in force.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        pool: WorkerRegistry,
        embedding: Sequence[str],
        keys: Callable[[], KeyRing],
        counted: RequestMeter,
    ) -> None:
        self._client = client
        self._pool = pool
        self._embedding = embedding
        self._keys = keys
        self._counted = counted
        self._turn = count()

    def add_routes(self, app: web.Application) -> None:
        for path in PASSED_ON:
            app.router.add_post(path, self.pass_on)

    async def pass_on(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._counted.request(request.path, headers) as ending:
            answer = await self._answer(request, headers)
            ending.outcome = _outcome(answer.status)
            return answer

    async def _answer(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        keys = self._keys()
        body = _scrubbed(request.path, await request.read(), keys.tenant(headers))
        url = self._worker(request.path)
        try:
            async with self._client.post(
                url + request.path,
                data=body,
                headers={**keys.forwarded(headers), "Content-Type": "application/json"},
            ) as answer:
                if answer.status in (401, 403) and keys.judges:
                    raise WorkerError(f"a worker refuses the router: {answer.status}")
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                    headers={h: answer.headers[h] for h in _PASSED_BACK if h in answer.headers},
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerError(f"{url} did not answer: {describe(error)}") from error

    def _worker(self, path: str) -> str:
        if path == EMBEDDINGS and self._embedding:
            return self._embedding[next(self._turn) % len(self._embedding)]
        role = Role.REPLICA if self._pool.has(Role.REPLICA) else Role.DECODE
        worker = self._pool.place(role, None)
        if worker is None:
            raise WorkerError(f"no {role} worker is alive, or all are being drained")
        return worker.name


def _scrubbed(path: str, raw: bytes, tenant: str) -> bytes:
    """The body as a worker may see it; the client's own bytes where nothing had to be done.

    Raises:
        RequestError: it is no JSON object.
    """
    given = json_object(raw)
    fields = without_routing(given)
    if path == EMBEDDINGS:
        isolate(fields, tenant)
    return raw if fields == given else json_bytes(fields)


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    if status == 429:
        return Outcome.OVERLOADED
    return Outcome.REJECTED if status < 500 else Outcome.WORKER_ERROR
