"""Decode servers with data parallelism: each rank is a home, and all ranks step together."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from eval.cluster import Launcher
from eval.tiny_layers import Family
from eval.tiny_model import ModelSpec
from ppd.contract import Role
from ppd.policies import static_policy

from .conversation import Conversation, user_messages
from .routes import RouteClient, random_ids
from .workers import (
    Workers,
    begin_stop,
    extra_environment,
    log_after,
    log_size,
    metric,
    plugin_states,
    start_cluster,
    start_decode,
    wait_ready,
    wait_until,
)

_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
_ATTENTION_TP = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
_PLAIN = ("--dp-size", "2")
_LONG = 2500  # tokens
_CACHED = re.compile(r"#cached-token: (\d+)")  # of a prefill batch, in SGLang's log


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(_ATTENTION, id="dp-attention"),
        pytest.param(_ATTENTION_TP, id="attention-tp", marks=pytest.mark.matrix),
        pytest.param(_PLAIN, id="plain", marks=pytest.mark.matrix),
    ],
)
def ranks(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The flags of a server with two ranks."""
    flags: tuple[str, ...] = request.param
    return flags


def bound(ranks: tuple[str, ...]) -> dict[str, str]:
    """Return the CPU of each process; without it SGLang needs a NUMA node for each."""
    processes = 4 if ranks is _ATTENTION_TP else 2
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(i % 2) for i in range(processes))}


@pytest.fixture(scope="module")
def workers(ranks: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """A prefill worker of one rank, a decode worker of two, and a monolithic server of one."""
    yield from start_cluster(
        ModelSpec(family=Family.DEEPSEEK_V3),
        tmp_path_factory.mktemp("ranks"),
        page_size=1,
        monolithic=True,
        # SGLang divides the size among the ranks.
        decode_flags=(*ranks, "--chunked-prefill-size", "512"),
        decode_environment=bound(ranks),
    )


def on_rank(http: aiohttp.ClientSession, workers: Workers, rank: int) -> RouteClient:
    return RouteClient(http, workers, rank=rank)


async def prefilled(http: aiohttp.ClientSession, workers: Workers) -> dict[int, int]:
    """Local prefills by rank."""
    states = await plugin_states(http, workers.decode)
    return {state["dp_rank"]: state["prefilled"] for state in states}


@pytest.mark.parametrize("policy", ["full", "pd"])
async def test_conversations_stay_on_their_ranks(
    workers: Workers, http: aiohttp.ClientSession, policy: str
) -> None:
    """Every later turn finds what its rank holds, by the engine's own count."""
    await workers.settle(http)
    assert workers.monolithic is not None
    texts = [user_messages(seed, 3) for seed in range(6)]
    async with workers.routed(static_policy(policy)) as url:
        clients = [Conversation(http, url) for _ in texts]
        got = await asyncio.gather(*(c.send_all(t) for c, t in zip(clients, texts, strict=True)))
        predicted = await metric(http, url, "ppd_cached_tokens_predicted_total")
        actual = await metric(http, url, "ppd_cached_tokens_actual_total")
    for turns, messages in zip(got, texts, strict=True):
        assert [t.route for t in turns[1:]] == ["local" if policy == "full" else "remote"] * 2
        for before, turn in pairwise(turns):
            assert turn.cached_tokens >= before.total_tokens - 2
        alone = await Conversation(http, workers.monolithic.url).send_all(messages)
        assert [t.ids for t in turns] == [t.ids for t in alone]
    assert predicted <= actual  # first turns find what the chat template has in common
    assert (predicted > 0) == (policy == "full"), "it is predicted for local turns"
    await workers.settle(http)


async def test_ranks_describe_themselves_under_one_name(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    states = await plugin_states(http, workers.decode)
    assert sorted(state["dp_rank"] for state in states) == [0, 1]
    assert len({state["boot_id"] for state in states}) == 1


async def test_each_rank_prefills_its_own_turns(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    before = await prefilled(http, workers)
    assert set(before) == {0, 1}
    for rank in (0, 1):
        await on_rank(http, workers, rank).local(random_ids(rank, 200), 4)
        before[rank] += 1
        assert await prefilled(http, workers) == before
    await workers.settle(http)


async def test_a_long_append_beside_the_decodes_of_the_other_rank(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """It is chunked, as it would be beside decodes of its own rank."""
    await workers.settle(http)
    decoding = asyncio.create_task(on_rank(http, workers, 0).local(random_ids(1, 100), 300))

    async def decodes() -> bool:
        states = await plugin_states(http, workers.decode)
        return bool(sum(state["running"] for state in states) == 1)

    await wait_until(decodes, decoding)
    appended = await on_rank(http, workers, 1).local(random_ids(2, _LONG), 20)
    beside = await decoding
    alone = RouteClient(http, workers)
    assert beside.ids == (await alone.alone(random_ids(1, 100), 300)).ids
    assert appended.ids == (await alone.alone(random_ids(2, _LONG), 20)).ids
    chunks = max(state["chunks"] for state in await plugin_states(http, workers.decode))
    assert chunks > _LONG // 256 + 1
    await workers.settle(http)


async def test_appends_on_both_ranks_at_once(workers: Workers, http: aiohttp.ClientSession) -> None:
    await workers.settle(http)
    seeds = range(6)
    got = await asyncio.gather(
        *(
            on_rank(http, workers, seed % 2).local(random_ids(seed, 300 + 400 * seed), 30)
            for seed in seeds
        )
    )
    for seed, reply in zip(seeds, got, strict=True):
        alone = await RouteClient(http, workers).alone(random_ids(seed, 300 + 400 * seed), 30)
        assert reply.ids == alone.ids
    await workers.settle(http)


async def test_a_paused_server_continues_on_both_ranks(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    turns = [
        asyncio.create_task(on_rank(http, workers, rank).local(random_ids(rank, 700), 100))
        for rank in (0, 1)
    ]

    async def both_run() -> bool:
        states = await plugin_states(http, workers.decode)
        return bool(sum(state["running"] + state["prefilling"] for state in states) == 2)

    await wait_until(both_run, *turns)
    for path, body in (("pause_generation", {"mode": "in_place"}), ("continue_generation", {})):
        await _post(http, f"{workers.decode.url}/{path}", body)
    for rank, turn in enumerate(turns):
        alone = await RouteClient(http, workers).alone(random_ids(rank, 700), 100)
        assert (await turn).ids == alone.ids
    await workers.settle(http)


async def test_an_aborted_append_frees_its_rank(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    other = asyncio.create_task(on_rank(http, workers, 0).local(random_ids(1, 100), 200))
    aborted = asyncio.create_task(on_rank(http, workers, 1).local(random_ids(2, _LONG), 50))

    async def prefills() -> bool:
        return any(state["prefilling"] for state in await plugin_states(http, workers.decode))

    await wait_until(prefills, other, aborted)
    aborted.cancel()
    await asyncio.gather(aborted, return_exceptions=True)
    alone = await RouteClient(http, workers).alone(random_ids(1, 100), 200)
    assert (await other).ids == alone.ids
    await workers.settle(http)


async def test_a_flush_empties_both_ranks(workers: Workers, http: aiohttp.ClientSession) -> None:
    """Each conversation has one remote turn, and then finds its rank's KV again."""
    await workers.settle(http)
    texts = [user_messages(seed, 4) for seed in range(4)]
    async with workers.routed(static_policy("full")) as url:
        clients = [Conversation(http, url) for _ in texts]
        for turn in range(4):
            if turn == 2:
                await workers.settle(http)  # which flushes
            turns = await asyncio.gather(
                *(one.send(text[turn]) for one, text in zip(clients, texts, strict=True))
            )
            expected = "local" if turn in (1, 3) else "remote"
            assert [one.route for one in turns] == [expected] * 4
    await workers.settle(http)


@pytest.mark.matrix
async def test_retracted_requests_continue_on_their_ranks(
    ranks: tuple[str, ...], workers: Workers, launcher: Launcher, http: aiohttp.ClientSession
) -> None:
    """SGLang's test switch retracts a request in every fifth decode step."""
    decode = start_decode(
        workers,
        launcher,
        "retracting-ranks",
        *(*ranks, "--max-total-tokens", "3504", "--chunked-prefill-size", "256"),
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        environment={
            **bound(ranks),
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "5",
        },
    )
    retracting = replace(workers, decode=decode)
    try:
        await retracting.settle(http)
        routes = ("remote", "local", "remote", "local")
        seeds, requeued = iter(range(40)), False
        while not requeued:  # which requests are retracted depends on when they come
            of_round = list(itertools.islice(seeds, 8))
            assert of_round, "a rank retracted no local prefill"
            got = await asyncio.gather(
                *(on_rank(http, retracting, seed % 2).converse(seed, routes) for seed in of_round)
            )
            for seed, replies in zip(of_round, got, strict=True):
                alone = await RouteClient(http, workers).converse(seed, ("alone",) * 4)
                assert [r.ids for r in replies] == [r.ids for r in alone], f"conversation {seed}"
            states = await plugin_states(http, decode)
            requeued = all(state["requeued"] > 0 for state in states)
        await retracting.settle(http)
    finally:
        begin_stop([decode])


@pytest.mark.matrix
async def test_ranks_of_a_prefill_worker_keep_their_conversations(
    ranks: tuple[str, ...], workers: Workers, launcher: Launcher, http: aiohttp.ClientSession
) -> None:
    """Remote turns find what their rank has prefilled, by the engine's own count."""
    if ranks is _PLAIN:
        pytest.skip("plain ranks of prefill servers fail upstream: docs/UPSTREAM.md")
    if ranks is _ATTENTION_TP:
        pytest.skip("two servers of four processes each answer too late on two cores")
    page = ("--page-size", str(workers.page_size))
    with extra_environment(launcher, bound(ranks)):
        prefill = launcher.worker(Role.PREFILL, workers.model, *page, *ranks, name="ranks-p")
    wait_ready(prefill)
    ranked = replace(workers, prefill=prefill)
    try:
        await ranked.settle(http)
        log_start = log_size(prefill)
        texts = [user_messages(seed, 3) for seed in range(6)]
        async with ranked.routed(static_policy("pd")) as url:
            clients = [Conversation(http, url) for _ in texts]
            got = await asyncio.gather(
                *(c.send_all(t) for c, t in zip(clients, texts, strict=True))
            )
        found = sum(map(int, _CACHED.findall(log_after(prefill, log_start))))
        assert found >= sum(turn.prompt_tokens - 1 for turns in got for turn in turns[:-1])
        assert workers.monolithic is not None
        for turns, messages in zip(got, texts, strict=True):
            alone = await Conversation(http, workers.monolithic.url).send_all(messages)
            assert [t.ids for t in turns] == [t.ids for t in alone]
        await ranked.settle(http)
    finally:
        begin_stop([prefill])


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
