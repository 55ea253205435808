"""Streams whose decode worker is lost, and that go on elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eval.dialects import DONE, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker

from ..conftest import Client, Cluster, Reply
from ..scripts import InTurn, answering, resetting, usage


def chunk(number: int, **delta: Any) -> bytes:
    return event({"id": f"id{number}", "choices": [{"index": 0, "delta": delta}]})


def rest(number: int, *words: str, cached: int = 64) -> Script:
    """A stream of its own, as an engine begins one."""

    async def script(request: Request) -> None:
        request.send(chunk(number, role="assistant", content=""))
        for word in words:
            request.send(chunk(number, content=word))
        counts = usage(102, len(words), cached)
        request.send(event({"id": f"id{number}", "choices": [], "usage": counts}))
        request.send(DONE)

    return script


def cut_off(number: int, *parts: bytes) -> Script:
    async def script(request: Request) -> None:
        request.send(b"".join(parts))
        request.drop()

    return script


LOST = cut_off(
    1, chunk(1, role="assistant", content=""), chunk(1, content="one "), chunk(1, content="two ")
)


def text_of(reply: Reply) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for one in reply.events
        for choice in one.get("choices", ())
    )


def scripted_workers(*scripts: Script) -> tuple[tuple[FakeWorker, ...], InTurn]:
    """A prefill worker, and a decode worker for each script."""
    decode = InTurn(*scripts)
    decoders = [FakeWorker("decode", decode) for _ in scripts]
    return (FakeWorker("prefill", answering()), *decoders), decode


async def count(client: Client, outcome: str) -> float:
    return await client.metric("ppd_streams_resumed_total", outcome=outcome)


async def test_the_client_sees_one_stream(cluster: Cluster) -> None:
    workers, decode = scripted_workers(LOST, rest(2, "three ", "four"))
    async with cluster(*workers, resume_streams=1) as client:
        options = {"stream_options": {"include_usage": True}, "max_tokens": 10, "min_tokens": 1}
        reply = await client.chat("hello", stream=True, **options)
        assert text_of(reply) == "one two three four"
        assert {one["id"] for one in reply.events} == {"id1"}
        roles = [o["choices"][0]["delta"].get("role") for o in reply.events if o["choices"]]
        assert roles.count("assistant") == 1
        assert reply.events[-1]["usage"]["prompt_tokens"] == 100
        assert reply.events[-1]["usage"]["completion_tokens"] == 4
        asked = decode.bodies[-1]
        assert decode.workers[0] is not decode.workers[1]
        assert asked["messages"][-1] == {"role": "assistant", "content": "one two "}
        assert asked["continue_final_message"] is True
        assert (asked["max_tokens"], asked["min_tokens"]) == (8, 0)
        assert "bootstrap_room" in asked
        assert await count(client, "ok") == 1
        labels = {"endpoint": "/v1/chat/completions", "outcome": "ok"}
        assert await client.metric("ppd_finished_total", **labels) == 1
        # The conversation is where it ended.
        later = await client.chat("hello", "one two three four", "and")
        assert later.route == ("local", "policy_full")
        assert decode.workers[2] is decode.workers[1]


async def test_a_completion_goes_on_behind_its_prompt(cluster: Cluster) -> None:
    def piece(number: int, text: str) -> bytes:
        return event({"id": f"c{number}", "choices": [{"index": 0, "text": text}]})

    async def going_on(request: Request) -> None:
        request.send(piece(2, "three") + DONE)

    workers, decode = scripted_workers(cut_off(1, piece(1, "one "), piece(1, "two ")), going_on)
    async with cluster(*workers, resume_streams=1) as client:
        body = {"model": MODEL, "prompt": "count: ", "stream": True}
        reply = await client.post("/v1/completions", body)
        texts = [one["choices"][0]["text"] for one in reply.events]
        assert texts == ["one ", "two ", "three"]
        assert decode.bodies[-1]["prompt"] == "count: one two "


async def test_a_second_loss_goes_on_from_all_that_was_sent(cluster: Cluster) -> None:
    lost_again = cut_off(2, chunk(2, role="assistant", content=""), chunk(2, content="three "))
    workers, decode = scripted_workers(LOST, lost_again, rest(3, "four"))
    async with cluster(*workers, resume_streams=2) as client:
        reply = await client.chat("hello", stream=True)
        assert text_of(reply) == "one two three four"
        assert decode.bodies[-1]["messages"][-1]["content"] == "one two three "


async def test_what_was_lost_before_any_text_begins_anew(cluster: Cluster) -> None:
    nothing_yet = cut_off(1, chunk(1, role="assistant", content=""))
    workers, decode = scripted_workers(nothing_yet, rest(2, "one"))
    async with cluster(*workers, resume_streams=1) as client:
        assert text_of(await client.chat("hello", stream=True)) == "one"
        assert decode.bodies[-1]["messages"][-1]["role"] == "user"


TOOL = chunk(1, tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "{"}}])


@pytest.mark.parametrize(
    ("lost", "fields"),
    [
        (LOST, {"response_format": {"type": "json_object"}}),
        (LOST, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (LOST, {"max_tokens": 2}),
        (cut_off(1, TOOL), {}),
        (cut_off(1, chunk(1, reasoning_content="hm")), {}),
    ],
    ids=["grammar", "tools", "limit-reached", "tool-call", "reasoning"],
)
async def test_what_would_not_be_the_same_reply_is_truncated(
    cluster: Cluster, lost: Script, fields: dict[str, Any]
) -> None:
    workers, decode = scripted_workers(lost, rest(2, "no"))
    async with cluster(*workers, resume_streams=1) as client:
        reply = await client.chat("hello", stream=True, **fields)
        assert [("error" in one) for one in reply.events].count(True) == 1
        assert len(decode.requests) == 1


async def test_it_is_opt_in(cluster: Cluster) -> None:
    workers, decode = scripted_workers(LOST, rest(2, "no"))
    async with cluster(*workers) as client:
        reply = await client.chat("hello", stream=True)
        assert reply.events[-1]["error"]["code"] == 502
        assert len(decode.requests) == 1


async def test_when_nobody_can_go_on_there_is_one_error_and_an_end(cluster: Cluster) -> None:
    workers, _ = scripted_workers(resetting, resetting)
    async with cluster(*workers, resume_streams=1) as client:
        reply = await client.chat("hello", stream=True)
        assert [("error" in one) for one in reply.events].count(True) == 1
        assert text_of(reply) == "onetwoonetwo"
        assert (await count(client, "ok"), await count(client, "failed")) == (1, 1)


async def test_a_worker_that_hangs_does_not_hold_up_the_rest(cluster: Cluster) -> None:
    """A probe takes up to five seconds, and the client waits in mid-stream."""
    workers, _ = scripted_workers(LOST, rest(2, "three ", "four"), rest(2, "three ", "four"))
    async with cluster(*workers, resume_streams=1, probe_interval_s=60.0) as client:
        for engine in workers:
            engine.probes_hang = engine.role == "decode"
        reply = await asyncio.wait_for(client.chat("hello", stream=True, max_tokens=6), 4.0)
        assert text_of(reply) == "one two three four"
