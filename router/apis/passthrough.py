"""Requests that one worker answers unchanged: of encoders, and requests to the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import aiohttp
from aiohttp import web

from ppd.contract import Role
from ppd.errors import WorkerError
from ppd.outcome import Outcome

from ..intake.catalog import Catalog
from ..intake.keys import KeyRing
from ..intake.requests import json_bytes, json_object
from ..intake.scrub import isolate, without_routing
from ..wire.errors import describe
from ..workers.health import worker_of
from .request_meter import RequestMeter

EMBEDDINGS, RERANK, SCORE, CLASSIFY = "/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"
COUNT_TOKENS = "/v1/messages/count_tokens"
_OF_ENCODERS = (EMBEDDINGS, RERANK, SCORE, CLASSIFY)
PASSED_ON = (*_OF_ENCODERS, "/v1/tokenize", "/v1/detokenize", COUNT_TOKENS)
_RESPONSE_HEADERS = ("Retry-After",)


class Passthrough:
    """Forwards requests to one worker each.

    Args:
        client: a session whose timeouts suit such requests.
        catalog: the models.
        encoders: base URLs of the workers of each model that only embeds, ranks, scores or
            classifies; "": those of all names that are not listed. Without any, a decode worker
            or replica gets such requests.
        keys: returns the current keys.
        meter: charges and counts the requests.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        catalog: Catalog,
        encoders: Mapping[str, Sequence[str]],
        keys: Callable[[], KeyRing],
        meter: RequestMeter,
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._encoders = {model: cycle(urls) for model, urls in encoders.items() if urls}
        self._keys = keys
        self._meter = meter

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of all forwarded paths."""
        for path in PASSED_ON:
            app.router.add_post(path, self.pass_on)

    async def pass_on(self, request: web.Request) -> web.Response:
        """Forward one request, and return the worker's response.

        Raises:
            RequestError: the key is unknown, a limit is reached, the body is no JSON object, or
                no model has the name in it.
            WorkerError: no worker is ready, or it did not respond.
        """
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._meter.request(request.path, headers) as ending:
            response = await self._forward(request, headers)
            ending.outcome = _outcome(response.status)
            return response

    async def _forward(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        keys = self._keys()
        raw, tenant = await request.read(), keys.tenant(headers)
        given = json_object(raw)
        body = _scrubbed(request.path, given, raw, tenant)
        url = self._worker_url(request.path, given.get("model"))
        try:
            async with self._client.post(
                url + request.path,
                data=body,
                allow_redirects=False,
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

    def _worker_url(self, path: str, model: object) -> str:
        encodes = path in _OF_ENCODERS
        if encodes:
            own = self._encoders.get(model) if isinstance(model, str) else None
            if (urls := own or self._encoders.get("")) is not None:
                return next(urls)
        workers = self._catalog.workers(model, encodes=encodes)
        role = Role.REPLICA if workers.has(Role.REPLICA) else Role.DECODE
        worker = workers.place(role, None)
        if worker is None:
            raise WorkerError(f"no {role} worker is alive, or all are being drained")
        return worker_of(worker).url


def _scrubbed(path: str, given: dict[str, Any], raw: bytes, tenant: str) -> bytes:
    """The body without routing fields; the client's own bytes if it had none.

    Args:
        path: that it was sent to.
        given: its fields.
        raw: as it came.
        tenant: its sender.
    """
    fields = without_routing(given)
    if path in _OF_ENCODERS:
        isolate(fields, tenant)
    return raw if fields == given else json_bytes(fields)


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    if status == 429:
        return Outcome.OVERLOADED
    return Outcome.REJECTED if status < 500 else Outcome.WORKER_ERROR
