"""On any route a turn's tokens are those of one monolithic server (fp32, greedy)."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import aiohttp
import orjson
import pytest

from ppd.decision import Policy
from ppd.policies import static_policy

from .conversation import Conversation, RandomRoutes, Turn, stream_events, user_messages
from .generation import CONSTRAINTS, compare_constrained
from .workers import Workers

CONVERSATIONS, TURNS = 4, 5


async def converse(
    http: aiohttp.ClientSession, url: str, seed: int, turns: int = TURNS
) -> list[Turn]:
    """Hold a whole conversation on a URL."""
    return await Conversation(http, url).send_all(user_messages(seed, turns))


def check_cached(turns: list[Turn], page_size: int) -> None:
    """Check that local turns found all earlier tokens, up to page rounding and the last token."""
    for before, turn in pairwise(turns):
        if turn.route == "local":
            min_cached = (before.total_tokens - 1) // page_size * page_size
            assert min_cached <= turn.cached_tokens <= before.total_tokens


@pytest.mark.parametrize("name", ["pd", "full", "coin"])
async def test_token_ids_do_not_depend_on_the_route(
    workers: Workers, http: aiohttp.ClientSession, name: str
) -> None:
    await workers.settle(http)
    policy: Policy = RandomRoutes(random.Random(7)) if name == "coin" else static_policy(name)
    routes: list[str] = []
    async with workers.routed(policy) as url:
        assert workers.monolithic is not None
        for seed in range(CONVERSATIONS):
            routed = await converse(http, url, seed)
            expected = await converse(http, workers.monolithic.url, seed)
            assert [t.ids for t in routed] == [t.ids for t in expected]
            assert len({tuple(t.ids) for t in routed}) == TURNS, "greedy output must vary"
            assert routed[0].route == "remote"
            check_cached(routed, workers.page_size)
            routes += [t.route for t in routed[1:]]
    allowed = {"pd": {"remote"}, "full": {"local"}, "coin": {"remote", "local"}}[name]
    assert set(routes) == allowed
    await workers.settle(http)


async def test_many_conversations_at_once(workers: Workers, http: aiohttp.ClientSession) -> None:
    await workers.settle(http)
    seeds = range(100, 132)
    async with workers.routed(RandomRoutes(random.Random(1))) as url:
        routed = await asyncio.gather(*(converse(http, url, seed, 3) for seed in seeds))
    assert workers.monolithic is not None
    for seed, turns in zip(seeds, routed, strict=True):
        expected = await converse(http, workers.monolithic.url, seed, 3)
        assert [t.ids for t in turns] == [t.ids for t in expected], f"conversation {seed}"
        check_cached(turns, workers.page_size)
    assert {t.route for turns in routed for t in turns[1:]} == {"remote", "local"}
    await workers.settle(http)


async def prompt_turn(
    http: aiohttp.ClientSession, url: str, path: str, field: str, prompt: Any, stream: bool
) -> tuple[str, Any]:
    """Send one turn of a growing prompt; give the route and the reply, as ids or text."""
    native = path == "/generate"
    limits = {"max_new_tokens": 12} if native else {"max_tokens": 12}
    body: dict[str, Any] = {field: prompt, "stream": stream}
    if native:
        body["sampling_params"] = {**limits, "temperature": 0}
    else:
        body |= {**limits, "temperature": 0, "model": "default"}
    async with http.post(url + path, json=body) as response:
        data = await response.read()
        assert response.status == 200, data.decode()
        route = response.headers.get("X-PPD-Route", "")
    replies = list(stream_events(data)) if stream else [orjson.loads(data)]
    if native:
        return route, replies[-1]["output_ids" if field == "input_ids" else "text"]
    return route, "".join(part["choices"][0]["text"] for part in replies if part["choices"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/generate", "text"), ("/generate", "input_ids"), ("/v1/completions", "prompt")],
)
async def test_growing_prompts_are_recognised_too(
    workers: Workers, http: aiohttp.ClientSession, path: str, field: str, stream: bool
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    source = random.Random(field + path)
    ids = field == "input_ids"

    def new_part(n: int) -> Any:
        return [source.randrange(10, 90) for _ in range(n)] if ids else user_messages(n, 1, n)[0]

    prompt = new_part(300)
    async with workers.routed(static_policy("full")) as url:
        for turn in range(4):
            route, reply = await prompt_turn(http, url, path, field, prompt, stream)
            _, expected = await prompt_turn(
                http, workers.monolithic.url, path, field, prompt, stream
            )
            assert reply == expected
            assert route == ("local" if turn else "remote")
            prompt = prompt + reply + new_part(25)
    await workers.settle(http)


async def test_a_batch_is_served(workers: Workers, http: aiohttp.ClientSession) -> None:
    async with workers.routed(static_policy("full")) as url:
        body = {
            "text": ["one two", "three"],
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        }
        async with http.post(f"{url}/generate", json=body) as response:
            assert response.headers["X-PPD-Reason"] == "batch"
            replies = await response.json()
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [4, 4]
    await workers.settle(http)


async def test_who_hangs_up_ends_no_request_but_his_own(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """SGLang aborts every request whose id begins with the one that is aborted."""
    async with workers.routed(static_policy("full")) as url:

        def request(rid: str) -> Any:
            sampling = {"max_new_tokens": 150, "ignore_eos": True}
            body = {"text": f"{rid} one two three", "rid": rid, "stream": True}
            return http.post(f"{url}/generate", json={**body, "sampling_params": sampling})

        async with request("12") as other:
            async with request("1") as aborted:
                assert (await aborted.content.readline()).startswith(b"data: ")
            *_, last = stream_events(await other.read())
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 150}
    assert last["meta_info"]["completion_tokens"] == 150
    await workers.settle(http)


async def test_logprobs_of_a_local_turn_are_those_of_a_monolithic_one(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Input logprobs too, which SGLang's decode server leaves to the prefill server."""
    await workers.settle(http)
    assert workers.monolithic is not None
    ids = [10 + i % 70 for i in range(200)]
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    async with workers.routed(static_policy("full")) as url:
        await prompt_turn(http, url, "/generate", "input_ids", ids[:150], False)
        replies = []
        for server in (url, workers.monolithic.url):
            # The marked start is behind the cached prefix, so both compute the same rows.
            async with http.post(
                f"{server}/generate", json={**body, "logprob_start_len": 180}
            ) as response:
                replies.append((response.headers.get("X-PPD-Route"), await response.json()))
    (route, reply), (_, expected) = replies
    assert route == "local"
    for name in ("input_token_logprobs", "output_token_logprobs"):
        rows, expected_rows = reply["meta_info"][name], expected["meta_info"][name]
        assert [row[1] for row in rows] == [row[1] for row in expected_rows]
        values = [row[0] for row in rows if row[0] is not None]
        expected_values = [row[0] for row in expected_rows if row[0] is not None]
        assert values == pytest.approx(expected_values, abs=1e-4)
    await workers.settle(http)


@pytest.mark.parametrize("fields", CONSTRAINTS, ids=lambda fields: next(iter(fields)))
async def test_what_shapes_a_reply_shapes_a_local_one(
    workers: Workers, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    await compare_constrained(workers, http, fields)
