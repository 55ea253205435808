"""A fake SGLang worker: real sockets, scripted answers. For faults, not for correctness."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from ppd.contract import DESCRIPTION_VERSION

Script = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

MODEL = "fake"
PAGE = 16


@dataclass(slots=True, eq=False)
class FakeEngine:
    """One worker. ``script`` answers every generation; the rest is as SGLang's."""

    role: str
    script: Script
    local_prefill: bool = True
    description_version: object = DESCRIPTION_VERSION
    model: str = MODEL
    ready: bool = True
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kv_token_bytes: int | None = None
    kv_events: dict[str, object] | None = None
    special_tokens: tuple[str, ...] = ()
    keeps_sessions: bool = False
    free_tokens: int | None = None
    probes_hang: bool = False
    running: int = 0
    loads_fail: bool = False
    load_written_at: float = 0.0
    load_asks: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        self.arrived.set()
        try:
            return await self.script(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise

    async def server_info(self, _request: web.Request) -> web.Response:
        plugin: dict[str, object] = {"version": self.description_version, "local_prefill": True}
        plugin |= {"boot_id": self.boot_id, "vocab_size": 4096}
        plugin["special_tokens"] = self.special_tokens
        if self.kv_token_bytes is not None:
            plugin["kv_token_bytes"] = self.kv_token_bytes
        state = {"ppd": plugin} if self.local_prefill else {}
        return web.json_response(
            {
                "disaggregation_mode": self.role,
                "disaggregation_bootstrap_port": 4321,
                "page_size": PAGE,
                "version": "0.5.21",
                "kv_events": self.kv_events,
                "enable_session_radix_cache": self.keeps_sessions,
                "internal_states": [state],
            }
        )

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 1000}]})

    async def loads(self, request: web.Request) -> web.Response:
        self.load_asks.put_nowait(None)
        if self.loads_fail:
            assert request.transport is not None
            request.transport.abort()
        if self.free_tokens is None:
            return web.Response(status=404)
        load = {
            "max_total_num_tokens": 10_000,
            "num_total_tokens": 10_000 - self.free_tokens,
            "num_running_reqs": self.running,
            "timestamp": self.load_written_at,
        }
        return web.json_response({"loads": [load]})

    async def load_is_known(self) -> None:
        """Wait until the router has read what the load is now."""
        while not self.load_asks.empty():
            self.load_asks.get_nowait()
        await self.load_asks.get()
        await self.load_asks.get()  # it asks again only when it has read the answer

    async def is_ready(self, _request: web.Request) -> web.Response:
        if self.probes_hang:
            self.probed.set()
            await asyncio.Event().wait()
        return web.Response(status=200 if self.ready else 503)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeEngine]:
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings"):
            app.router.add_post(path, self.generate)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/ready", self.is_ready)
        app.router.add_get("/health", self.is_ready)
        app.router.add_post("/flush_cache", self.is_ready)
        app.router.add_get("/v1/loads", self.loads)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@asynccontextmanager
async def stoppable(engine: FakeEngine) -> AsyncIterator[AsyncExitStack]:
    """It serves until what this gives is closed."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine.serving())
        yield stack


def event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached} if cached else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def token(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def answering(prompt: int = 100, cached: int = 0, words: int = 3) -> Script:
    """A whole answer: ``words`` chunks, usage, the end."""

    async def script(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        counts = usage(prompt, words, cached)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "w" * words}
            return web.json_response({"choices": [{"message": message}], "usage": counts})
        response = await start_stream(request)
        for i in range(words):
            await response.write(token(f"w{i}"))
        if body["stream_options"]["include_usage"]:
            await response.write(event({"choices": [], "usage": counts}))
        await response.write(DONE)
        return response

    return script


def failing(status: int, message: str) -> Script:
    """An error before anything else, in the form SGLang gives it."""

    async def script(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        flat = {"object": "error", "message": message, "type": "x", "code": status}
        if not body.get("stream"):
            return web.json_response(flat, status=status)
        response = await start_stream(request)
        await response.write(event({"error": flat}) + DONE)
        return response

    return script


async def hanging(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def resetting(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Resets the connection after two chunks."""
    response = await start_stream(request)
    await response.write(token("one") + token("two"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def ending_early(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A clean end of file without ``[DONE]``."""
    response = await start_stream(request)
    await response.write(token("one"))
    return response


async def streaming_forever(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """One chunk, then nothing until somebody hangs up."""
    response = await start_stream(request)
    await response.write(token("one"))
    await asyncio.Event().wait()
    return response


def gated(gate: asyncio.Event) -> Script:
    """One chunk, and the end when the gate is open."""

    async def script(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(token("one"))
        await gate.wait()
        await response.write(DONE)
        return response

    return script
