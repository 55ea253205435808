"""A router that is told to stop while clients wait."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from eval.dialects import DONE
from eval.fake_worker.request import Request, Script
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from router.config.options import RouterConfig
from router.server.run import running

from ..conftest import CHAT_BODY
from ..fixtures import CHAT, until
from ..scripts import answering, hanging, resetting, streaming_forever

STREAM = {**CHAT_BODY, "stream": True}
MESSAGE = {**STREAM, "max_tokens": 100}
RESPONSE = {"model": MODEL, "input": "hello", "stream": True}
GENERATE = {"text": "hello", "stream": True}


@asynccontextmanager
async def router(*decode: FakeWorker, **options: Any) -> AsyncIterator[tuple[str, AsyncExitStack]]:
    """Its URL, and what ends it when it is closed."""
    async with AsyncExitStack() as workers, AsyncExitStack() as life:
        prefill = FakeWorker("prefill", answering())
        for engine in (prefill, *decode):
            await workers.enter_async_context(engine.serving())
        urls = tuple(engine.url for engine in decode)
        config = RouterConfig(prefill=(prefill.url,), decode=urls, port=0, policy="full", **options)
        yield await life.enter_async_context(running(config)), life


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, STREAM, b'"the router is stopping","type":"router_error"'),
        (CHAT, {**STREAM, "n": 2}, b'"the router is stopping","type":"router_error"'),
        ("/generate", GENERATE, b'"the router is stopping","type":"router_error"'),
        ("/v1/messages", MESSAGE, b"event: error\n"),
        ("/v1/responses", RESPONSE, b"event: response.failed\n"),
    ],
)
async def test_a_stream_that_has_not_ended_is_ended(
    path: str, body: dict[str, Any], says: bytes, tmp_path: Path
) -> None:
    log = tmp_path / "decisions"
    decode = FakeWorker("decode", streaming_forever)
    options = {"shutdown_grace_s": 0.05, "decision_log": str(log)}
    async with aiohttp.ClientSession() as http, router(decode, **options) as (url, life):
        async with http.post(url + path, json=body) as answer:
            assert answer.status == 200
            begun = b""
            while begun.count(b"one") < body.get("n", 1):
                begun += await answer.content.readany()
            leaving = asyncio.create_task(life.aclose())
            received = begun + await answer.content.read()  # to a good end of the body
        await leaving
    assert received.count(b"the router is stopping") == 1
    assert says in received
    if "/v1/m" not in path and "/v1/r" not in path:
        assert received.endswith(DONE)
    told = map(orjson.loads, log.read_bytes().splitlines())
    ends = Counter(one["outcome"] for one in told if "outcome" in one)
    assert ends == {"stopped": body.get("n", 1)}


@pytest.mark.parametrize("first", [streaming_forever, answering()])
async def test_of_several_samples_one_may_not_have_begun(tmp_path: Path, first: Script) -> None:
    """Whether the other has ended or not, the client learns that one is missing."""
    log = tmp_path / "decisions"
    options = {"shutdown_grace_s": 0.05, "decision_log": str(log)}
    calls = itertools.count()

    async def second_hangs(request: Request) -> None:
        script = first if next(calls) == 0 else hanging
        await script(request)

    decode = FakeWorker("decode", second_hangs)
    async with aiohttp.ClientSession() as http, router(decode, **options) as (url, life):
        async with http.post(url + CHAT, json={**STREAM, "n": 2}) as answer:
            begun = b""
            while b"w2" not in begun and b"one" not in begun:
                begun += await answer.content.readany()
            leaving = asyncio.create_task(life.aclose())
            received = begun + await answer.content.read()
        await leaving
    assert received.count(b"the router is stopping") == 1
    assert received.endswith(DONE)
    assert log.read_bytes().count(b'"outcome":"stopped"') == 1 + (first is streaming_forever)


async def test_a_stream_that_is_to_go_on_elsewhere_is_ended_once(tmp_path: Path) -> None:
    """Nobody comes back from the worker that has the rest."""
    log, rest = tmp_path / "decisions", asyncio.Event()
    options = {"shutdown_grace_s": 0.05, "decision_log": str(log), "resume_streams": 1}
    calls = itertools.count()

    async def lost_then_silent(request: Request) -> None:
        if next(calls) == 0:
            await resetting(request)
        else:
            rest.set()
            await hanging(request)

    both = [FakeWorker("decode", lost_then_silent) for _ in range(2)]
    async with aiohttp.ClientSession() as http, router(*both, **options) as (url, life):
        async with http.post(url + CHAT, json=STREAM) as answer:
            await rest.wait()
            leaving = asyncio.create_task(life.aclose())
            received = b""
            while not received.endswith(DONE):
                received += await answer.content.readany()
        await leaving
    assert received.count(b"the router is stopping") == 1
    assert b'"outcome":"stopped"' in log.read_bytes()


async def test_who_has_no_answer_yet_gets_one(tmp_path: Path) -> None:
    log = tmp_path / "decisions"
    decode = FakeWorker("decode", hanging)
    options = {"shutdown_grace_s": 0.05, "decision_log": str(log)}
    async with aiohttp.ClientSession() as http, router(decode, **options) as (url, life):
        asked = asyncio.create_task(http.post(url + CHAT, json=CHAT_BODY).__aenter__())
        await decode.arrived.wait()
        leaving = asyncio.create_task(life.aclose())
        async with await asked as answer:
            told = await answer.json()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert told["error"]["message"] == "the router is stopping"
        await leaving
    assert b'"outcome":"stopped"' in log.read_bytes()


async def test_load_balancers_see_it_while_requests_are_still_served() -> None:
    decode = FakeWorker("decode", answering())
    async with (
        aiohttp.ClientSession() as http,
        router(decode, shutdown_delay_s=600.0) as (url, life),
    ):

        async def status() -> int:
            async with http.get(f"{url}/health") as answer:
                return answer.status

        assert await status() == 200
        leaving = asyncio.create_task(life.aclose())

        async def unready() -> bool:
            return await status() == 503

        await until(unready)
        async with http.get(f"{url}/health") as answer:
            assert (await answer.json())["status"] == "stopping"
        async with http.post(url + CHAT, json=CHAT_BODY) as answer:
            assert answer.status == 200
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
