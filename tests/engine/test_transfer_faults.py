"""SGLang's own test aids: the checksum of transferred KV, and transfers that are made to fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import aiohttp
import pytest

from eval.cluster import Launcher
from ppd.contract import Role

from .conversation import Conversation, RandomRoutes, Turn, user_messages
from .workers import (
    Workers,
    begin_stop,
    extra_environment,
    start_decode,
    wait_ready,
)

CONVERSATIONS, TURNS = 8, 5
_CHECKSUM = "--disaggregation-enable-kv-checksum"
_needs_partial_checksum = pytest.mark.skipif(
    version("sglang") == "0.5.21",
    reason="0.5.21 digests the whole prompt, also what the decode server held before",
)


@contextmanager
def started(
    workers: Workers, launcher: Launcher, name: str, *flags: str, environment: Mapping[str, str]
) -> Iterator[Workers]:
    """Run a prefill and a decode worker with further flags and variables."""
    page = ("--page-size", str(workers.page_size))
    with extra_environment(launcher, environment):
        prefill = launcher.worker(Role.PREFILL, workers.model, *page, *flags, name=f"{name}-p")
    decode = start_decode(workers, launcher, f"{name}-d", *flags, environment=environment)
    wait_ready(prefill)
    try:
        yield replace(workers, prefill=prefill, decode=decode)
    finally:
        begin_stop([prefill, decode])


async def converse(http: aiohttp.ClientSession, workers: Workers, seed: int) -> list[list[Turn]]:
    """Hold conversations over mixed routes at one time.

    A client accepts an error only of a request that the router has sent twice.
    """
    async with workers.routed(RandomRoutes(random.Random(seed))) as url:
        return await asyncio.gather(
            *(
                Conversation(http, url, resends=True).send_all(user_messages(i, TURNS))
                for i in range(CONVERSATIONS)
            )
        )


async def check_ids(
    http: aiohttp.ClientSession, workers: Workers, conversations: list[list[Turn]]
) -> None:
    """Check that all ids are those of a monolithic server, and that both routes were taken."""
    assert workers.monolithic is not None
    for i, turns in enumerate(conversations):
        alone = Conversation(http, workers.monolithic.url)
        expected = await alone.send_all(user_messages(i, TURNS))
        assert [t.ids for t in turns] == [t.ids for t in expected]
    routes = {turn.route for turns in conversations for turn in turns[1:]}
    assert routes == {"remote", "local"}


@_needs_partial_checksum
async def test_all_transferred_kv_has_its_checksum(
    workers: Workers, launcher: Launcher, http: aiohttp.ClientSession
) -> None:
    with started(workers, launcher, "checksum", _CHECKSUM, environment={}) as checked:
        conversations = await converse(http, checked, seed=1)
        await check_ids(http, checked, conversations)
        await checked.settle(http)
        assert "checksum mismatch" not in checked.decode.log.read_text()


@_needs_partial_checksum
async def test_a_checksum_that_does_not_match_costs_one_retry(
    workers: Workers, launcher: Launcher, http: aiohttp.ClientSession
) -> None:
    probability = {"SGLANG_TEST_DISAGG_KV_CHECKSUM_MISMATCH_PROB": "0.1"}
    with started(workers, launcher, "mismatch", _CHECKSUM, environment=probability) as checked:
        for seed in range(6):  # some 24 transfers each: one in twelve rounds has no mismatch
            conversations = await converse(http, checked, seed)
            await check_ids(http, checked, conversations)
            if "KV checksum mismatch" in checked.decode.log.read_text():
                break
        else:
            pytest.fail("no checksum was found that does not match")
        await checked.settle(http)


async def test_transfers_that_fail_are_retried(
    workers: Workers,
    launcher: Launcher,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The probability is that of each poll of a transfer, of which a request has many.

    The router's log is read, because 0.5.23 logs an injected failure at debug level only.
    """
    probability = {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.003"}
    with started(workers, launcher, "failing", environment=probability) as failing:
        for seed in range(6):
            conversations = await converse(http, failing, seed)
            await check_ids(http, failing, conversations)
            if "KVTransferError" in caplog.text:
                break
        else:
            pytest.fail("no transfer failed")
        await failing.settle(http)
