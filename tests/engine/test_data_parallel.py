"""A prefill server with two ranks of data parallelism, each with a radix cache of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import aiohttp
import pytest

from eval.cluster import Launcher
from ppd.contract import Role
from ppd.policies import static_policy

from .conversation import Conversation, user_messages
from .workers import Workers, begin_stop, wait_ready

_CONVERSATIONS, _TURNS = 6, 4


@pytest.fixture(scope="module")
def two_ranks(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The shared workers, but a prefill server with two ranks."""
    page = ("--page-size", str(workers.page_size))
    flags = ("--dp-size", "2", "--enable-metrics")
    prefill = launcher.worker(Role.PREFILL, workers.model, *page, *flags, name="two-ranks")
    wait_ready(prefill)
    yield replace(workers, prefill=prefill)
    begin_stop([prefill])


async def test_later_remote_turns_find_their_prefix_on_their_rank(
    two_ranks: Workers, http: aiohttp.ClientSession
) -> None:
    await two_ranks.settle(http)
    before = await _cached_tokens(http, two_ranks)
    async with two_ranks.routed(static_policy("pd")) as url:
        held = await asyncio.gather(
            *(
                Conversation(http, url).send_all(user_messages(seed, _TURNS))
                for seed in range(_CONVERSATIONS)
            )
        )
    assert two_ranks.monolithic is not None
    for seed, turns in enumerate(held):
        alone = Conversation(http, two_ranks.monolithic.url)
        expected = await alone.send_all(user_messages(seed, _TURNS))
        assert [turn.ids for turn in turns] == [turn.ids for turn in expected]
        assert {turn.route for turn in turns} == {"remote"}
    # The earlier prompt of each later turn, rounded down to a page.
    page = two_ranks.page_size
    earlier = sum(a.prompt_tokens // page * page for turns in held for a, _ in pairwise(turns))
    assert await _cached_tokens(http, two_ranks) - before >= 0.95 * earlier
    await two_ranks.settle(http)


async def _cached_tokens(http: aiohttp.ClientSession, workers: Workers) -> float:
    """Read how many prompt tokens the prefill server has found in its caches."""
    async with http.get(f"{workers.prefill.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    values = [line for line in lines if line.startswith("sglang:cached_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in values)
