"""Mixture-of-experts models and multi-head latent attention: ids are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import aiohttp
import pytest

from eval.tiny_layers import Family
from eval.tiny_model import ModelSpec

from .reference import greedy_ids, reference_model
from .routes import Reply, RouteClient, random_ids
from .workers import Workers, start_cluster

REPLY_TOKENS = 40
_CELLS = [
    pytest.param((Family.QWEN3_MOE, 16), id="qwen3_moe-page16"),
    pytest.param((Family.DEEPSEEK_V3, 1), id="deepseek_v3-page1"),
    pytest.param((Family.QWEN3_MOE, 1), id="qwen3_moe-page1", marks=pytest.mark.matrix),
    pytest.param((Family.DEEPSEEK_V3, 16), id="deepseek_v3-page16", marks=pytest.mark.matrix),
]
_ROUTES = {
    "delta": ("remote",) * 4,
    "local": ("remote", "local", "local", "local"),
    "mixed": ("remote", "local", "remote", "local"),
}


@pytest.fixture(scope="module", params=_CELLS)
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """Prefill, decode and a monolithic server; the decode worker's chunks are small."""
    family, page_size = request.param
    logs = tmp_path_factory.mktemp(f"{family}-page{page_size}")
    yield from start_cluster(
        ModelSpec(family=family),
        logs,
        page_size,
        monolithic=True,
        decode_flags=("--chunked-prefill-size", "256"),
    )


def check_cached(replies: list[Reply], routes: tuple[str, ...], page_size: int) -> None:
    """Check that each local turn found all that the turn before left, but its last page."""
    assert len(replies) == len(routes)
    held = 0
    for route, (before, reply) in zip(routes[1:], pairwise(replies), strict=True):
        held = max(held, before.cached_tokens)
        if route == "local":
            assert reply.cached_tokens >= held + len(before.ids) - page_size


async def test_a_monolithic_server_generates_what_transformers_does(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    model = reference_model(workers.model)
    prompts = [random_ids(length, length) for length in (30, 300, 2500)]
    # Computed first: the server closes connections that are idle for five seconds.
    expected = [greedy_ids(model, ids, REPLY_TOKENS) for ids in prompts]
    assert len({i for reply in expected for i in reply}) > REPLY_TOKENS // 2, "output must vary"
    await workers.settle(http)
    client = RouteClient(http, workers)
    for ids, reply in zip(prompts, expected, strict=True):
        assert (await client.alone(ids, REPLY_TOKENS)).ids == reply
    await workers.settle(http)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("routes", _ROUTES.values(), ids=_ROUTES)
async def test_ids_do_not_depend_on_the_route(
    workers: Workers, http: aiohttp.ClientSession, routes: tuple[str, ...], at_once: int
) -> None:
    await workers.settle(http)
    client = RouteClient(http, workers)
    got = await asyncio.gather(*(client.converse(seed, routes) for seed in range(at_once)))
    for seed, replies in enumerate(got):
        alone = await client.converse(seed, ("alone",) * len(routes))
        assert [r.ids for r in replies] == [r.ids for r in alone], f"conversation {seed}"
        check_cached(replies, routes, workers.page_size)
    await workers.settle(http)


async def test_long_prompts_are_transferred_and_appended(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """First turns of 2,500 tokens, and appends as long, chunked beside running decodes."""
    await workers.settle(http)
    client = RouteClient(http, workers)
    lengths = {"first_tokens": 2500, "new_tokens": 2500}
    routes = ("remote", "local", "remote")
    long = asyncio.create_task(client.converse(50, routes, **lengths))
    short = await asyncio.gather(*(client.converse(seed, _ROUTES["mixed"]) for seed in range(3)))
    expected = await client.converse(50, ("alone",) * 3, **lengths)
    assert [r.ids for r in await long] == [r.ids for r in expected]
    for seed, replies in enumerate(short):
        alone = await client.converse(seed, ("alone",) * 4)
        assert [r.ids for r in replies] == [r.ids for r in alone]
    await workers.settle(http)
