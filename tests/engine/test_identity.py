"""Whatever route a turn takes, the tokens are those of one monolithic server (fp32, greedy)."""

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

from .conftest import Workers
from .shaped import SHAPES, compare_shaped
from .talk import Coin, Talk, Turn, events, script

CONVERSATIONS, TURNS = 4, 5


async def hold(http: aiohttp.ClientSession, url: str, seed: int, turns: int = TURNS) -> list[Turn]:
    talk = Talk(http, url)
    for text in script(seed, turns):
        await talk.say(text)
    return talk.turns


def check_cached(turns: list[Turn], page_size: int) -> None:
    """Local turns find everything earlier, up to page rounding and the last token."""
    for before, turn in pairwise(turns):
        if turn.route == "local":
            least = (before.total_tokens - 1) // page_size * page_size
            assert least <= turn.cached_tokens <= before.total_tokens


@pytest.mark.parametrize("name", ["pd", "full", "coin"])
async def test_token_ids_do_not_depend_on_the_route(
    workers: Workers, http: aiohttp.ClientSession, name: str
) -> None:
    await workers.settle(http)
    policy: Policy = Coin(random.Random(7)) if name == "coin" else static_policy(name)
    routes: list[str] = []
    async with workers.routed(policy) as url:
        assert workers.monolithic is not None
        for seed in range(CONVERSATIONS):
            ours = await hold(http, url, seed)
            alone = await hold(http, workers.monolithic.url, seed)
            assert [t.ids for t in ours] == [t.ids for t in alone]
            assert len({tuple(t.ids) for t in ours}) == TURNS, "greedy output must vary"
            assert ours[0].route == "remote"
            check_cached(ours, workers.page_size)
            routes += [t.route for t in ours[1:]]
    expected = {"pd": {"remote"}, "full": {"local"}, "coin": {"remote", "local"}}[name]
    assert set(routes) == expected
    await workers.settle(http)


async def test_many_conversations_at_once(workers: Workers, http: aiohttp.ClientSession) -> None:
    await workers.settle(http)
    seeds = range(100, 132)
    async with workers.routed(Coin(random.Random(1))) as url:
        ours = await asyncio.gather(*(hold(http, url, seed, 3) for seed in seeds))
    assert workers.monolithic is not None
    for seed, turns in zip(seeds, ours, strict=True):
        alone = await hold(http, workers.monolithic.url, seed, 3)
        assert [t.ids for t in turns] == [t.ids for t in alone], f"conversation {seed}"
        check_cached(turns, workers.page_size)
    assert {t.route for turns in ours for t in turns[1:]} == {"remote", "local"}
    await workers.settle(http)


async def prompt_turn(
    http: aiohttp.ClientSession, url: str, path: str, field: str, prompt: Any, stream: bool
) -> tuple[str, Any]:
    """One turn of a growing prompt; gives the route and the reply, as ids or text."""
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
    answers = list(events(data)) if stream else [orjson.loads(data)]
    if native:
        return route, answers[-1]["output_ids" if field == "input_ids" else "text"]
    return route, "".join(a["choices"][0]["text"] for a in answers if a["choices"])


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

    def piece(n: int) -> Any:
        return [source.randrange(10, 90) for _ in range(n)] if ids else script(n, 1, n)[0]

    prompt = piece(300)
    async with workers.routed(static_policy("full")) as url:
        for turn in range(4):
            route, ours = await prompt_turn(http, url, path, field, prompt, stream)
            _, alone = await prompt_turn(http, workers.monolithic.url, path, field, prompt, stream)
            assert ours == alone
            assert route == ("local" if turn else "remote")
            prompt = prompt + ours + piece(25)
    await workers.settle(http)


async def test_a_batch_is_served(workers: Workers, http: aiohttp.ClientSession) -> None:
    async with workers.routed(static_policy("full")) as url:
        body = {
            "text": ["one two", "three"],
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        }
        async with http.post(f"{url}/generate", json=body) as response:
            assert response.headers["X-PPD-Reason"] == "batch"
            answers = await response.json()
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [4, 4]
    await workers.settle(http)


async def test_who_hangs_up_ends_no_request_but_his_own(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """SGLang aborts every request whose id begins with the one that is aborted."""
    async with workers.routed(static_policy("full")) as url:

        def ask(rid: str) -> Any:
            sampling = {"max_new_tokens": 150, "ignore_eos": True}
            body = {"text": f"{rid} one two three", "rid": rid, "stream": True}
            return http.post(f"{url}/generate", json={**body, "sampling_params": sampling})

        async with ask("12") as other:
            async with ask("1") as left:
                assert (await left.content.readline()).startswith(b"data: ")
            *_, last = events(await other.read())
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 150}
    assert last["meta_info"]["completion_tokens"] == 150
    await workers.settle(http)


async def test_logprobs_of_a_local_turn_are_those_of_a_monolithic_one(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Input logprobs too, which upstream's decode server leaves to the prefill server."""
    await workers.settle(http)
    assert workers.monolithic is not None
    ids = [10 + i % 70 for i in range(200)]
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    async with workers.routed(static_policy("full")) as url:
        await prompt_turn(http, url, "/generate", "input_ids", ids[:150], False)
        answers = []
        for server in (url, workers.monolithic.url):
            # The marked start is behind the cached prefix, so both compute the same rows.
            async with http.post(
                f"{server}/generate", json={**body, "logprob_start_len": 180}
            ) as response:
                answers.append((response.headers.get("X-PPD-Route"), await response.json()))
    (route, ours), (_, alone) = answers
    assert route == "local"
    for name in ("input_token_logprobs", "output_token_logprobs"):
        left, right = ours["meta_info"][name], alone["meta_info"][name]
        assert [row[1] for row in left] == [row[1] for row in right]
        values = [row[0] for row in left if row[0] is not None]
        assert values == pytest.approx([row[0] for row in right if row[0] is not None], abs=1e-4)
    await workers.settle(http)


@pytest.mark.parametrize("fields", SHAPES, ids=lambda fields: next(iter(fields)))
async def test_what_shapes_a_reply_shapes_a_local_one(
    workers: Workers, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    await compare_shaped(workers, http, fields)
