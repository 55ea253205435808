"""Faults on the real engine: evicted KV, token drift, disconnected clients, invalid requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import pytest

from eval.cluster import Process
from ppd.policies import static_policy

from .conversation import Conversation, user_messages
from .workers import Workers, load_of, metric, plugin_state, wait_until


async def test_an_evicted_conversation_goes_remote_and_on(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    opening, second, third = user_messages(5, 3)
    async with workers.routed(static_policy("full")) as url:
        conversation, other = Conversation(http, url), Conversation(http, url)
        await conversation.send(opening)
        await other.send(user_messages(6, 1)[0])
        await workers.settle(http)  # it empties the decode worker's cache
        turn = await conversation.send(second)
        assert (turn.route, turn.reason) == ("remote", "refused_by_worker")
        turn = await other.send(third)
        assert (turn.route, turn.reason) == ("remote", "home_gone"), "the refusal names the flush"
        refused = 'ppd_local_refused_total{reason="too_few_cached_tokens"}'
        assert await metric(http, url, refused) == 1
        assert (await conversation.send(third)).route == "local"
    assert workers.monolithic is not None
    expected = await Conversation(http, workers.monolithic.url).send_all((opening, second, third))
    assert [t.ids for t in conversation.turns] == [t.ids for t in expected]
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
    texts = user_messages(3, 5, 300)
    async with bpe_workers.routed(static_policy("full")) as url:
        local = await Conversation(http, url).send_all(texts)
        assert {t.route for t in local[1:]} == {"local"}
        missed = await metric(http, url, "ppd_cache_mispredictions_total")
        assert missed == 1, "from then on the conversation's replies are not counted on"
        predicted = await metric(http, url, "ppd_cached_tokens_predicted_total")
        actual = await metric(http, url, "ppd_cached_tokens_actual_total")
        reply_tokens = sum(len(t.ids) for t in local)
        assert abs(actual - predicted) < reply_tokens, "the prompts were all there"
    await bpe_workers.settle(http)
    async with bpe_workers.routed(static_policy("pd")) as url:
        remote = await Conversation(http, url).send_all(texts)
    assert [t.ids for t in local] == [t.ids for t in remote]
    await bpe_workers.settle(http)


Condition = Callable[[aiohttp.ClientSession, Workers], Awaitable[bool]]


async def prefilling_on_p(http: aiohttp.ClientSession, workers: Workers) -> bool:
    """Whether the prefill worker prefills a request."""
    return bool((await plugin_state(http, workers.prefill))["prefilling"])


async def prefilling_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    """Whether the decode worker prefills a local request."""
    return bool((await plugin_state(http, workers.decode))["prefilling"])


async def waiting_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    """Whether a local request waits on the decode worker."""
    return bool((await plugin_state(http, workers.decode))["waiting"])


async def decoding_on_d(http: aiohttp.ClientSession, workers: Workers) -> bool:
    """Whether the decode worker decodes a request."""
    return bool((await load_of(http, workers.decode))["num_running_reqs"])


async def post_chat(
    http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], stream: bool
) -> None:
    """Send a request for a long reply and read the reply."""
    body = {"messages": messages, "max_tokens": 4000, "temperature": 0, "stream": stream}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        await response.read()


async def hang_up(
    http: aiohttp.ClientSession, workers: Workers, request: asyncio.Task[None], when: Condition
) -> None:
    """Close the connection of a request once the condition holds."""
    await wait_until(partial(when, http, workers), request)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


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
        conversation = Conversation(http, url)
        if turn == 2:
            await conversation.send("An opening that both will remember. " * 8)
        messages = [*conversation.messages, {"role": "user", "content": "x. " * (new_chars // 3)}]
        request = asyncio.create_task(post_chat(http, url, messages, stream))
        await hang_up(http, workers, request, phase)
        await workers.settle(http)  # nothing is left running, nothing leaked
        assert (await conversation.send("Are you still there?")).ids


async def test_a_client_hangs_up_while_its_local_turn_waits(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """It waits behind another local prefill, in the plugin's own queue."""
    await workers.settle(http)
    async with workers.routed(static_policy("full")) as url:
        first, second = Conversation(http, url), Conversation(http, url)
        await first.send("The first conversation opens here, at some length. " * 4)
        await second.send("The second one opens in quite another way, as long. " * 4)
        before = (await plugin_state(http, workers.decode))["aborted"]
        long_turn = [*first.messages, {"role": "user", "content": "y. " * 8000}]
        prefilling = asyncio.create_task(post_chat(http, url, long_turn, True))
        await wait_until(partial(prefilling_on_d, http, workers), prefilling)
        short_turn = [*second.messages, {"role": "user", "content": "z. " * 2000}]
        waiting = asyncio.create_task(post_chat(http, url, short_turn, True))
        await hang_up(http, workers, waiting, waiting_on_d)

        async def is_aborted() -> bool:
            return bool((await plugin_state(http, workers.decode))["aborted"] > before)

        await wait_until(is_aborted, prefilling)  # before the queue moves on
        prefilling.cancel()
        await asyncio.gather(prefilling, return_exceptions=True)
    await workers.settle(http)


async def test_a_paused_local_turn_goes_on_as_if_nothing_had_been(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """pause_generation(retract) drops the KV of running requests (weight updates do that)."""
    await workers.settle(http)
    assert workers.monolithic is not None
    texts = ["An opening for this conversation. " * 8, "And now something long."]
    before = await plugin_state(http, workers.decode)
    async with workers.routed(static_policy("full")) as url:
        conversation = Conversation(http, url, max_tokens=300)
        await conversation.send(texts[0])
        turn = asyncio.create_task(conversation.send(texts[1]))
        await wait_until(partial(decoding_on_d, http, workers), turn)
        await post(http, workers.decode, "/pause_generation", {"mode": "retract"})
        await post(http, workers.decode, "/continue_generation", {})
        assert (await turn).route == "local"
    assert (await plugin_state(http, workers.decode))["requeued"] > before["requeued"]
    expected = await Conversation(http, workers.monolithic.url, max_tokens=300).send_all(texts)
    assert [t.ids for t in conversation.turns] == [t.ids for t in expected]
    await workers.settle(http)


async def post(
    http: aiohttp.ClientSession, worker: Process, path: str, body: dict[str, Any]
) -> None:
    """Send a command to a worker, which must accept it."""
    async with http.post(worker.url + path, json=body) as response:
        assert response.status == 200, await response.text()


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
            reply = await response.json()
            assert response.status == status, reply
    assert named in reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error"
    await workers.settle(http)
