"""Decode servers that are short of KV: which request loses its KV, and that none is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from eval.cluster import Launcher
from eval.engine.client import bootstrap_port_of
from ppd.contract import LocalTerms

from .conversation import Conversation, RandomRoutes, user_messages
from .generation import Generated, generate
from .workers import (
    Workers,
    begin_stop,
    log_after,
    log_size,
    plugin_state,
    queues_of,
    start_decode,
    wait_until,
)

_RETRACT_EVERY_FIFTH_STEP = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


@pytest.fixture(scope="module")
def retracting_workers(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The shared workers, but a decode worker that is always short of KV.

    It has room for 3,500 tokens, of 8 conversations of up to 1,000 tokens. SGLang's own test
    switch retracts a request in every fifth decode step.
    """
    flags = ("--max-total-tokens", "3504", "--chunked-prefill-size", "128")
    backup = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    decode = start_decode(
        workers, launcher, "retracting", *flags, *backup, environment=_RETRACT_EVERY_FIFTH_STEP
    )
    yield replace(workers, decode=decode)
    begin_stop([decode])


@pytest.fixture(scope="module")
def small_reserve_workers(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The shared workers, but a decode worker with 2,000 tokens of KV and hardly any reserve.

    It prefills 16 tokens in every 32 steps.
    """
    pool = ("--max-total-tokens", "2000", "--schedule-conservativeness", "0.05")
    reserve = ("--num-reserved-decode-tokens", "16")
    pace = ("--prefill-decode-interval", "32", "--ppd-append-chunk", "16")
    decode = start_decode(workers, launcher, "small-reserve", *pool, *reserve, *pace)
    yield replace(workers, decode=decode)
    begin_stop([decode])


async def start_request(
    http: aiohttp.ClientSession, workers: Workers, ids: list[int], sampling: dict[str, Any]
) -> asyncio.Task[Generated]:
    """Start a local request and wait until the decode worker decodes it."""

    async def decodes() -> bool:
        return bool((await plugin_state(http, workers.decode))["running"])

    anywhere = LocalTerms(0).to_custom_params()
    request = asyncio.create_task(generate(http, workers.decode.url, ids, sampling, anywhere))
    await wait_until(decodes, request)
    return request


async def test_requests_of_both_kinds_are_retracted_and_restored(
    retracting_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = retracting_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    before, log_start = await plugin_state(http, workers.decode), log_size(workers.decode)
    scripts = [user_messages(seed, 3) for seed in range(8)]
    async with workers.routed(RandomRoutes(random.Random(3))) as url:
        routed = await asyncio.gather(
            *(Conversation(http, url, max_tokens=60).send_all(texts) for texts in scripts)
        )
    for seed, (texts, turns) in enumerate(zip(scripts, routed, strict=True)):
        alone = Conversation(http, workers.monolithic.url, max_tokens=60)
        expected = await alone.send_all(texts)
        assert [t.ids for t in turns] == [t.ids for t in expected], f"conversation {seed}"
    assert {t.route for turns in routed for t in turns[1:]} == {"remote", "local"}
    state = await plugin_state(http, workers.decode)
    assert state["accepted"] > before["accepted"]
    assert log_after(workers.decode, log_start).count("Testing retraction") > 10
    await workers.settle(http)


async def test_what_is_in_transfer_arrives_while_a_retracted_request_has_no_room(
    retracting_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """SGLang reads no transfer then, and if nothing runs, nothing else frees KV."""
    workers = retracting_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    decode, monolithic = workers.decode.url, workers.monolithic.url
    anywhere = LocalTerms(0).to_custom_params()
    # Beside the transfer there is room for both local requests, but not for one of them with the
    # 512 tokens that SGLang wants for each of two requests before it restores a retracted one.
    transferred = [10 + i % 70 for i in range(2400)]
    local = [[20 + seed + i % 60 for i in range(200)] for seed in range(2)]
    sampling = {"max_new_tokens": 250, "min_new_tokens": 250}
    bootstrap = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": await bootstrap_port_of(http, workers.prefill.url),
        "bootstrap_room": 7,
    }

    async def is_in_transfer() -> bool:
        return (await queues_of(http, workers.decode))["decode_transfer_queue_reqs"] == 1

    async def is_retracted() -> bool:
        queues = await queues_of(http, workers.decode)
        return queues["decode_retracted_queue_reqs"] == queues["decode_transfer_queue_reqs"] == 1

    for ids in local:  # so that both decode soon after they have arrived, and at one time
        await generate(http, decode, ids, {"max_new_tokens": 1}, anywhere)
    remote = asyncio.create_task(generate(http, decode, transferred, {}, {}, **bootstrap))
    await wait_until(is_in_transfer, remote)
    running = [
        asyncio.create_task(generate(http, decode, ids, sampling, anywhere)) for ids in local
    ]
    ended, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    assert len(ended) == len(left) == 1
    # The other one is retracted, and stays so: the request in transfer holds its room.
    await wait_until(is_retracted, *left)
    await generate(http, workers.prefill.url, transferred, {}, {}, **bootstrap)
    replies = [await remote, *[await request for request in running]]
    assert replies == [
        await generate(http, monolithic, transferred, {}, {}),
        *[await generate(http, monolithic, ids, sampling, {}) for ids in local],
    ]
    await workers.settle(http)


async def test_what_nearly_fills_the_pool_is_restored(
    small_pool_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """SGLang waits for room for 512 more tokens, which the pool does not have."""
    workers = small_pool_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    log_start = log_size(workers.decode)
    small, large = ([first + i % 70 for i in range(n)] for first, n in ((10, 100), (20, 1500)))
    small_sampling = {"max_new_tokens": 700, "min_new_tokens": 700}
    large_sampling = {"max_new_tokens": 250, "min_new_tokens": 250}
    request = await start_request(http, workers, small, small_sampling)
    anywhere = LocalTerms(0).to_custom_params()
    large_reply = await generate(http, workers.decode.url, large, large_sampling, anywhere)
    small_reply = await request
    assert "KV cache pool is full. Retract requests" in log_after(workers.decode, log_start)
    monolithic = workers.monolithic.url
    assert large_reply == await generate(http, monolithic, large, large_sampling, {})
    assert small_reply == await generate(http, monolithic, small, small_sampling, {})
    await workers.settle(http)


# Of a request that outgrows the KV that is reserved for it. Not ignore_eos: for such requests
# SGLang 0.5.23 reserves all that they can grow to.
_OUTGROWING = {"max_new_tokens": 1400, "min_new_tokens": 1400}


async def test_a_half_done_prefill_gives_way_to_the_last_decode(
    small_reserve_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """The decode outgrows its reserve, and SGLang would abort it."""
    workers = small_reserve_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    before = await plugin_state(http, workers.decode)
    decoding, appended = [10 + i % 70 for i in range(300)], [20 + i % 60 for i in range(1200)]
    request = await start_request(http, workers, decoding, _OUTGROWING)
    anywhere = LocalTerms(0).to_custom_params()
    appended_reply = await generate(http, workers.decode.url, appended, {}, anywhere)
    decoding_reply = await request
    monolithic = workers.monolithic.url
    assert appended_reply == await generate(http, monolithic, appended, {}, {})
    assert decoding_reply == await generate(http, monolithic, decoding, _OUTGROWING, {})
    after = await plugin_state(http, workers.decode)
    assert after["requeued"] > before["requeued"]
    await workers.settle(http)


async def test_what_gave_way_is_not_refused_afterwards(
    small_reserve_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """A prefill gives way to a decode, which takes its cached prefix too.

    The prefill's client may have received the beginning of a reply by then.
    """
    workers = small_reserve_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    decode, monolithic = workers.decode.url, workers.monolithic.url
    held_tokens, anywhere = 900, LocalTerms(0).to_custom_params()
    appended = [20 + i % 60 for i in range(1200)]
    await generate(http, decode, appended[:held_tokens], {"max_new_tokens": 1}, anywhere)
    decoding = [10 + i % 70 for i in range(300)]
    before = await plugin_state(http, workers.decode)
    request = await start_request(http, workers, decoding, _OUTGROWING)
    terms = LocalTerms(held_tokens - workers.page_size).to_custom_params()
    appended_reply = await generate(http, decode, appended, {}, terms)
    decoding_reply = await request
    assert appended_reply == await generate(http, monolithic, appended, {}, {})
    assert decoding_reply == await generate(http, monolithic, decoding, _OUTGROWING, {})
    after = await plugin_state(http, workers.decode)
    assert after["requeued"] > before["requeued"]
    assert after["evicted_while_waiting"] == before["evicted_while_waiting"]
    await workers.settle(http)
