"""Workers killed while they serve: their streams go on elsewhere with the same tokens."""

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

from eval.cluster import Launcher, Process
from ppd.contract import Role
from router.config.options import RouterConfig
from router.server.run import running

from .workers import Workers, begin_stop, load_of, wait_ready, wait_until

_KILL_AFTER_CHUNKS = 24  # of the stream whose decode worker is killed
_TOKENS = 300  # of that stream: long enough to be killed in its middle


@pytest.fixture
def disposable_workers(
    workers: Workers, launcher: Launcher
) -> Iterator[tuple[Process, list[Process]]]:
    """A prefill worker and two decode workers that a test may kill."""
    if workers.page_size != 1:
        pytest.skip("once is enough: pages make no difference to it")
    prefill = launcher.worker(Role.PREFILL, workers.model, name="disposable-prefill")
    decode = [
        launcher.worker(Role.DECODE, workers.model, name=f"disposable-decode-{i}") for i in range(2)
    ]
    wait_ready(prefill, *decode)
    yield prefill, decode
    begin_stop([prefill, *decode])


@asynccontextmanager
async def routed(prefill: Process, decode: list[Process]) -> AsyncIterator[str]:
    """Run a router that resumes streams, in front of these workers; gives its URL."""
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


def chat_body(*contents: str, tokens: int) -> dict[str, Any]:
    """Make a streaming request of ``tokens`` tokens; users and assistants alternate."""
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


async def stream_chunks(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Send a streaming request; give each chunk as it arrives."""
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = orjson.loads(line[len(b"data: ") :])
                assert "error" not in chunk, chunk
                yield chunk


def text_of(chunk: dict[str, Any]) -> str:
    """Read the text of one chunk."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


async def whole_text(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """Send a streaming request; give the text of the whole reply."""
    return "".join([text_of(chunk) async for chunk in stream_chunks(http, url, body)])


async def home_of_running(http: aiohttp.ClientSession, decode: list[Process]) -> Process:
    """Wait until exactly one of the decode workers runs a request, and give it."""
    found: list[Process] = []

    async def one_runs() -> bool:
        loads = await asyncio.gather(*(load_of(http, worker) for worker in decode))
        pairs = zip(decode, loads, strict=True)
        found[:] = [worker for worker, load in pairs if load["num_running_reqs"]]
        return len(found) == 1

    await wait_until(one_runs)
    return found[0]


async def test_what_was_lost_goes_on_as_if_nothing_had_been(
    disposable_workers: tuple[Process, list[Process]],
    workers: Workers,
    http: aiohttp.ClientSession,
) -> None:
    prefill, decode = disposable_workers
    assert workers.monolithic is not None
    monolithic = workers.monolithic.url
    opening = "Tell me about the tide. " * 8
    body = chat_body(opening, tokens=_TOKENS)
    expected = await whole_text(http, monolithic, body)
    async with routed(prefill, decode) as url:
        texts: list[str] = []
        names: set[str] = set()
        usage: dict[str, Any] = {}
        async for chunk in stream_chunks(http, url, body):
            names.add(chunk["id"])
            texts.append(text_of(chunk))
            usage = chunk.get("usage") or usage
            if len(texts) == _KILL_AFTER_CHUNKS:
                home = await home_of_running(http, decode)
                os.killpg(home.popen.pid, signal.SIGKILL)
        text = "".join(texts)
        assert text.startswith(expected)
        # A chunk counts as one token, and none without text counts: the rest of the reply is
        # longer by what that leaves out. In this model a character is a token.
        uncounted_tokens = sum(len(part) - 1 for part in texts if part)
        silent_tokens = _TOKENS - len(expected)
        assert len(text) - len(expected) <= uncounted_tokens + silent_tokens
        assert len(names) == 1
        assert usage["completion_tokens"] >= _TOKENS
        # The conversation goes on where it ended. Then the prefill worker is killed too.
        left = next(worker for worker in decode if worker is not home)
        later = chat_body(opening, text, "And the moon?", tokens=20)
        assert await whole_text(http, url, later) == await whole_text(http, monolithic, later)
        os.killpg(prefill.popen.pid, signal.SIGKILL)
        first = chat_body("Something else. " * 12, tokens=20)
        async with http.post(f"{url}/v1/chat/completions", json=first) as response:
            assert response.headers["X-PPD-Reason"] == "no_prefill"
            assert b"error" not in await response.read()
        assert await whole_text(http, url, first) == await whole_text(http, monolithic, first)
        assert left.popen.poll() is None
