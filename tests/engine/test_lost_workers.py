"""Workers killed while they serve: real streams that go on elsewhere, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from eval.cluster import Launcher, Process, wait_all
from ppd.contract import Role
from router.config.options import RouterConfig
from router.server.run import running

from .conftest import Workers, load_of

_AFTER = 24  # chunks of the stream the decode worker is killed


@pytest.fixture
def mortal(workers: Workers, launcher: Launcher) -> Iterator[tuple[Process, list[Process]]]:
    """A prefill and two decode workers of its own, to be killed."""
    if workers.page_size != 1:
        pytest.skip("once is enough: pages make no difference to it")
    prefill = launcher.worker(Role.PREFILL, workers.model, name="mortal-prefill")
    decode = [launcher.worker(Role.DECODE, workers.model, name=f"mortal-{i}") for i in range(2)]
    wait_all([prefill, *decode])
    yield prefill, decode
    for process in (prefill, *decode):
        process.stop()


@asynccontextmanager
async def routed(prefill: Process, decode: list[Process]) -> AsyncIterator[str]:
    config = RouterConfig(
        prefill=(prefill.url,),
        decode=tuple(d.url for d in decode),
        port=0,
        policy="full",
        resume_streams=1,
        decode_fallback=True,
    )
    async with running(config) as url:
        yield url


def body(*contents: str, tokens: int) -> dict[str, Any]:
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(contents)
    ]
    return {
        "model": "default",
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def chunks(
    http: aiohttp.ClientSession, url: str, asked: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with http.post(f"{url}/v1/chat/completions", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = orjson.loads(line[len(b"data: ") :])
                assert "error" not in chunk, chunk
                yield chunk


def said(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


async def whole(http: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> str:
    return "".join([said(chunk) async for chunk in chunks(http, url, asked)])


async def test_what_was_lost_goes_on_as_if_nothing_had_been(
    mortal: tuple[Process, list[Process]], workers: Workers, http: aiohttp.ClientSession
) -> None:
    prefill, decode = mortal
    assert workers.monolithic is not None
    asked = body("Tell me about the tide. " * 8, tokens=300)
    alone = await whole(http, workers.monolithic.url, asked)
    async with routed(prefill, decode) as url:
        text, seen, names = "", 0, set()
        usage: dict[str, Any] = {}
        async for chunk in chunks(http, url, asked):
            names.add(chunk["id"])
            text += said(chunk)
            usage = chunk.get("usage") or usage
            seen += 1
            if seen == _AFTER:
                loads = await asyncio.gather(*(load_of(http, d) for d in decode))
                (home,) = (
                    d for d, load in zip(decode, loads, strict=True) if load["num_running_reqs"]
                )
                os.killpg(home.popen.pid, signal.SIGKILL)
        # A chunk may have held several tokens, and counts as one: then some more come in the end.
        assert text.startswith(alone)
        assert len(text) < len(alone) + 10
        assert len(names) == 1
        assert usage["completion_tokens"] >= 300
        # The conversation lives on where it ended; then the prefill worker dies, too.
        left = next(d for d in decode if d is not home)
        later = body("Tell me about the tide. " * 8, text, "And the moon?", tokens=20)
        assert await whole(http, url, later) == await whole(http, workers.monolithic.url, later)
        os.killpg(prefill.popen.pid, signal.SIGKILL)
        first = body("Something else. " * 12, tokens=20)
        async with http.post(f"{url}/v1/chat/completions", json=first) as answer:
            assert answer.headers["X-PPD-Reason"] == "no_prefill"
            assert b"error" not in await answer.read()
        assert await whole(http, url, first) == await whole(http, workers.monolithic.url, first)
        assert left.popen.poll() is None
