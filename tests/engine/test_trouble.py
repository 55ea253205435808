"""Evicted KV, drifting tokens, clients that hang up, wrong requests: on the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from eval.cluster import Process
from ppd.policies import static_policy

from .conftest import Workers, load_of, plugin_state
from .talk import Talk, script


async def metric(http: aiohttp.ClientSession, url: str, line: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        for found in (await answer.text()).splitlines():
            if found.startswith(line + " "):
                return float(found.split()[-1])
    return 0.0


async def test_an_evicted_conversation_goes_remote_and_on(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    opening, second, third = script(5, 3)
    async with workers.routed(static_policy("full")) as url:
        talk, other = Talk(http, url), Talk(http, url)
        await talk.say(opening)
        await other.say(script(6, 1)[0])
        await workers.settle(http)  # D forgets everything
        turn = await talk.say(second)
        assert (turn.route, turn.reason) == ("remote", "refused_by_worker")
        turn = await other.say(third)
        assert (turn.route, turn.reason) == ("remote", "home_gone"), "the refusal told of the flush"
        refused = 'ppd_local_refused_total{reason="too_few_cached_tokens"}'
        assert await metric(http, url, refused) == 1
        assert (await talk.say(third)).route == "local"
    assert workers.monolithic is not None
    alone = Talk(http, workers.monolithic.url)
    for text in (opening, second, third):
        await alone.say(text)
    assert [t.ids for t in talk.turns] == [t.ids for t in alone.turns]
    await workers.settle(http)


async def test_a_decode_worker_tells_what_a_token_of_kv_takes(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    model = json.loads((workers.model / "config.json").read_text())
    heads = model["num_key_value_heads"] * model["head_dim"]
    keys_and_values = 2 * model["num_hidden_layers"] * heads
    state = await plugin_state(http, workers.decode)
    assert state["kv_token_bytes"] == keys_and_values * 4, "in fp32"


async def test_token_drift_is_detected_and_survived(
    bpe_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """A reply's text may tokenize to other ids than were generated: less is cached."""
    texts = script(3, 5, 300)
    async with bpe_workers.routed(static_policy("full")) as url:
        local = Talk(http, url)
        for text in texts:
            await local.say(text)
        assert {t.route for t in local.turns[1:]} == {"local"}
        missed = await metric(http, url, "ppd_cache_mispredictions_total")
        assert missed == 1, "from then on the conversation's replies are not counted on"
        predicted = await metric(http, url, "ppd_cached_tokens_predicted_total")
        actual = await metric(http, url, "ppd_cached_tokens_actual_total")
        replies = sum(len(t.ids) for t in local.turns)
        assert abs(actual - predicted) < replies, "the prompts were all there"
    await bpe_workers.settle(http)
    async with bpe_workers.routed(static_policy("pd")) as url:
        remote = Talk(http, url)
        for text in texts:
            await remote.say(text)
    assert [t.ids for t in local.turns] == [t.ids for t in remote.turns]
    await bpe_workers.settle(http)


Condition = Callable[[aiohttp.ClientSession, Workers], Awaitable[bool]]


async def prefilling_on_p(http: aiohttp.ClientSession, workers: Workers) -> bool:
    return bool((await plugin_state(http, workers.prefill))["prefilling"])


async def prefilling_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    return bool((await plugin_state(http, workers.decode))["prefilling"])


async def waiting_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    return bool((await plugin_state(http, workers.decode))["waiting"])


async def decoding_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    return bool((await load_of(http, workers.decode))["num_running_reqs"])


async def send(
    http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], stream: bool
) -> None:
    body = {"messages": messages, "max_tokens": 4000, "temperature": 0, "stream": stream}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        await response.read()


async def hang_up(
    http: aiohttp.ClientSession, workers: Workers, task: asyncio.Task[None], when: Condition
) -> None:
    """Close the connection of ``task`` once the condition holds."""
    while not await when(http, workers):
        assert not task.done(), "the request ended before it reached the phase"
        await asyncio.sleep(0.01)  # asking without pause would take the workers' cores
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("turn", "new_chars", "phase"),
    [
        (1, 27_000, prefilling_on_p),
        (1, 500, decoding_on_d),
        (2, 20_000, prefilling_on_d),
        (2, 500, decoding_on_d),
    ],
    ids=["remote-prefill", "remote-decode", "local-prefill", "local-decode"],
)
async def test_a_client_hangs_up(
    workers: Workers,
    http: aiohttp.ClientSession,
    turn: int,
    new_chars: int,
    phase: Condition,
    stream: bool,
) -> None:
    await workers.settle(http)
    async with workers.routed(static_policy("full")) as url:
        talk = Talk(http, url)
        if turn == 2:
            await talk.say("An opening that both will remember. " * 8)
        messages = [*talk.messages, {"role": "user", "content": "x. " * (new_chars // 3)}]
        task = asyncio.create_task(send(http, url, messages, stream))
        await hang_up(http, workers, task, phase)
        await workers.settle(http)  # nothing is left running, nothing leaked
        assert (await talk.say("Are you still there?")).ids


async def test_a_client_hangs_up_while_its_local_turn_waits(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Behind another local prefill, so that it waits in the plugin's own queue."""
    await workers.settle(http)
    async with workers.routed(static_policy("full")) as url:
        busy, idle = Talk(http, url), Talk(http, url)
        await busy.say("The first conversation opens here, at some length. " * 4)
        await idle.say("The second one opens in quite another way, as long. " * 4)
        long_turn = [*busy.messages, {"role": "user", "content": "y. " * 8000}]
        ahead = asyncio.create_task(send(http, url, long_turn, True))
        while not await prefilling_on_d(http, workers):
            assert not ahead.done()
        behind = [*idle.messages, {"role": "user", "content": "z. " * 2000}]
        task = asyncio.create_task(send(http, url, behind, True))
        before = (await plugin_state(http, workers.decode))["aborted"]
        await hang_up(http, workers, task, waiting_on_d)
        while (await plugin_state(http, workers.decode))["aborted"] == before:
            assert not ahead.done(), "the abort came after the queue had moved on"
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
    await workers.settle(http)


async def test_a_paused_local_turn_goes_on_as_if_nothing_had_been(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """pause_generation(retract) drops the KV of running requests (weight updates do that)."""
    await workers.settle(http)
    assert workers.monolithic is not None
    texts = ["An opening for this conversation. " * 8, "And now something long."]
    async with workers.routed(static_policy("full")) as url:
        talk = Talk(http, url, max_tokens=300)
        await talk.say(texts[0])
        turn = asyncio.create_task(talk.say(texts[1]))
        while not await decoding_on_d(http, workers):
            assert not turn.done()
        await post(http, workers.decode, "/pause_generation", {"mode": "retract"})
        await post(http, workers.decode, "/continue_generation", {})
        assert (await turn).route == "local"
    assert (await plugin_state(http, workers.decode))["requeued"] > 0
    alone = Talk(http, workers.monolithic.url, max_tokens=300)
    for text in texts:
        await alone.say(text)
    assert [t.ids for t in talk.turns] == [t.ids for t in alone.turns]
    await workers.settle(http)


async def post(
    http: aiohttp.ClientSession, worker: Process, path: str, body: dict[str, Any]
) -> None:
    async with http.post(worker.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, 400, "context length"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}, 400, "max"),
    ],
)
async def test_what_the_engine_refuses_is_an_openai_error(
    workers: Workers,
    http: aiohttp.ClientSession,
    fields: dict[str, Any],
    status: int,
    named: str,
    stream: bool,
) -> None:
    async with workers.routed(static_policy("full")) as url:
        body = {"model": "default", "stream": stream, **fields}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == status, answer
    assert named in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    await workers.settle(http)
