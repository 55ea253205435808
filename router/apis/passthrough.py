"""Requests that one worker answers unchanged: embeddings, and requests to the tokenizer."""

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
_RESPONSE_HEADERS = ("Retry-After",)


class Passthrough:
    """Forwards requests to one worker each.

    Args:
        client: a session whose timeouts suit such requests.
        registry: the workers of the router.
        embedding: base URLs of workers that serve an embedding model. Without any, a decode
            worker or replica gets the requests for embeddings.
        keys: returns the current keys.
        meter: charges and counts the requests.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        registry: WorkerRegistry,
        embedding: Sequence[str],
        keys: Callable[[], KeyRing],
        meter: RequestMeter,
    ) -> None:
        self._client = client
        self._registry = registry
        self._embedding = embedding
        self._keys = keys
        self._meter = meter
        self._turn = count()

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of all forwarded paths."""
        for path in PASSED_ON:
            app.router.add_post(path, self.pass_on)

    async def pass_on(self, request: web.Request) -> web.Response:
        """Forward one request, and return the worker's response.

        Raises:
            RequestError: the key is unknown, a limit is reached, or the body is no JSON object.
            WorkerError: no worker is ready, or it did not respond.
        """
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._meter.request(request.path, headers) as ending:
            response = await self._forward(request, headers)
            ending.outcome = _outcome(response.status)
            return response

    async def _forward(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        keys = self._keys()
        body = _scrubbed(request.path, await request.read(), keys.tenant(headers))
        url = self._worker_url(request.path)
        try:
            async with self._client.post(
                url + request.path,
                data=body,
                headers={**keys.forwarded(headers), "Content-Type": "application/json"},
            ) as response:
                if response.status in (401, 403) and keys.checks_clients:
                    raise WorkerError(f"a worker refuses the router: {response.status}")
                return web.Response(
                    status=response.status,
                    body=await response.read(),
                    content_type=response.content_type,
                    headers={
                        name: response.headers[name]
                        for name in _RESPONSE_HEADERS
                        if name in response.headers
                    },
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerError(f"{url} did not answer: {describe(error)}") from error

    def _worker_url(self, path: str) -> str:
        if path == EMBEDDINGS and self._embedding:
            return self._embedding[next(self._turn) % len(self._embedding)]
        role = Role.REPLICA if self._registry.has(Role.REPLICA) else Role.DECODE
        worker = self._registry.place(role, None)
        if worker is None:
            raise WorkerError(f"no {role} worker is alive, or all are being drained")
        return worker.name


def _scrubbed(path: str, raw: bytes, tenant: str) -> bytes:
    """The body without routing fields; the client's own bytes if it had none.

    Raises:
        RequestError: the body is no JSON object.
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
