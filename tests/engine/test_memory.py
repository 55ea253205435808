"""Decode servers that are short of KV: who gives way, and that nobody is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest

from eval.cluster import Launcher, wait_all
from eval.engine.client import bootstrap_port_of
from ppd.contract import LocalTerms, Role

from .conftest import Workers, plugin_state, queues_of
from .shaped import generate
from .talk import Coin, Talk, Turn, script


@pytest.fixture
def pressed(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The same prefill and monolithic servers, with a decode server that is always short of KV.

    For 8 conversations of up to 1,000 tokens it has room for 3,500, and every fifth decode
    step upstream's own test switch retracts a request.
    """
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    launcher.environment |= retract
    decode = launcher.worker(
        *(Role.DECODE, workers.model, "--page-size", str(workers.page_size)),
        *("--max-total-tokens", "3504", "--chunked-prefill-size", "128"),
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        name="pressed",
    )
    for name in retract:
        del launcher.environment[name]
    wait_all([decode])
    yield replace(workers, decode=decode)
    decode.stop()


async def test_requests_of_both_kinds_are_retracted_and_restored(
    pressed: Workers, http: aiohttp.ClientSession
) -> None:
    async def hold(url: str, seed: int) -> list[Turn]:
        talk = Talk(http, url, max_tokens=60)
        for text in script(seed, 3):
            await talk.say(text)
        return talk.turns

    await pressed.settle(http)
    assert pressed.monolithic is not None
    async with pressed.routed(Coin(random.Random(3))) as url:
        ours = await asyncio.gather(*(hold(url, seed) for seed in range(8)))
    for seed, turns in enumerate(ours):
        alone = await hold(pressed.monolithic.url, seed)
        assert [t.ids for t in turns] == [t.ids for t in alone], f"conversation {seed}"
    assert {t.route for turns in ours for t in turns[1:]} == {"remote", "local"}
    state = await plugin_state(http, pressed.decode)
    assert state["accepted"] > 0
    assert pressed.decode.log.read_text().count("Testing retraction") > 10
    await pressed.settle(http)


async def test_what_is_in_transfer_arrives_while_a_retracted_request_has_no_room(
    pressed: Workers, http: aiohttp.ClientSession
) -> None:
    """Upstream looks at no transfer then, and if nothing runs, nothing else makes room."""
    await pressed.settle(http)
    assert pressed.monolithic is not None
    here, there = pressed.decode.url, pressed.monolithic.url
    anywhere = LocalTerms(0).to_custom_params()
    arriving = [10 + i % 70 for i in range(1900)]
    others = [[20 + seed + i % 60 for i in range(700)] for seed in range(2)]
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": await bootstrap_port_of(http, pressed.prefill.url),
        "bootstrap_room": 7,
    }
    first = asyncio.create_task(generate(http, here, arriving, {}, {}, **room))
    while not (await queues_of(http, pressed.decode))["decode_transfer_queue_reqs"]:
        assert not first.done()
    running = [asyncio.create_task(generate(http, here, ids, {}, anywhere)) for ids in others]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    # One has ended; the other was retracted meanwhile, and what is in transfer takes its room.
    queues = await queues_of(http, pressed.decode)
    assert queues["decode_retracted_queue_reqs"] == queues["decode_transfer_queue_reqs"] == 1
    assert [task.done() for task in running].count(True) == 1
    await generate(http, pressed.prefill.url, arriving, {}, {}, **room)
    ours = [await first, *[await task for task in running]]
    assert ours == [await generate(http, there, ids, {}, {}) for ids in (arriving, *others)]
    await pressed.settle(http)


@pytest.fixture
def narrow(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """A decode server with 2,000 tokens of KV that hardly reserves any of it for decodes to grow
    in, except where it restores retracted ones."""
    yield from _narrow(workers, launcher, name="narrow")


@pytest.fixture
def crowded(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """Such a server that reserves little there either and prefills 16 tokens in every 32 steps."""
    reserve = ("--num-reserved-decode-tokens", "16")
    pace = ("--prefill-decode-interval", "32", "--ppd-append-chunk", "16")
    yield from _narrow(workers, launcher, *reserve, *pace, name="crowded")


def _narrow(workers: Workers, launcher: Launcher, *flags: str, name: str) -> Iterator[Workers]:
    decode = launcher.worker(
        *(Role.DECODE, workers.model, "--page-size", str(workers.page_size)),
        *("--max-total-tokens", "2000", "--schedule-conservativeness", "0.05", *flags),
        name=name,
    )
    wait_all([decode])
    yield replace(workers, decode=decode)
    decode.stop()


async def test_what_nearly_fills_the_pool_is_restored(
    narrow: Workers, http: aiohttp.ClientSession
) -> None:
    """Upstream waits for room for 512 more tokens, which the pool does not have."""
    await narrow.settle(http)
    assert narrow.monolithic is not None
    here, there = narrow.decode.url, narrow.monolithic.url
    terms = LocalTerms(0).to_custom_params()
    small, large = ([at + i % 70 for i in range(n)] for at, n in ((10, 100), (20, 1500)))
    lasting = {"max_new_tokens": 700, "min_new_tokens": 700}
    growing = {"max_new_tokens": 250, "min_new_tokens": 250}
    first = asyncio.create_task(generate(http, here, small, lasting, terms))
    while not (await plugin_state(http, narrow.decode))["running"]:
        assert not first.done()
    ours = [await generate(http, here, large, growing, terms), await first]
    assert "KV cache pool is full. Retract requests" in narrow.decode.log.read_text()
    assert ours == [
        await generate(http, there, large, growing, {}),
        await generate(http, there, small, lasting, {}),
    ]
    await narrow.settle(http)


async def test_a_half_done_prefill_gives_way_to_the_last_decode(
    crowded: Workers, http: aiohttp.ClientSession
) -> None:
    """Which outgrows what was reserved for it; upstream would abort it."""
    await crowded.settle(http)
    assert crowded.monolithic is not None
    here, terms = crowded.decode.url, LocalTerms(0).to_custom_params()
    # Not ignore_eos: for such SGLang 0.5.23 reserves all that they can grow to.
    decoding = {"max_new_tokens": 1400, "min_new_tokens": 1400}
    asked = [
        ([10 + i % 70 for i in range(300)], decoding),
        ([20 + i % 60 for i in range(1200)], {}),
    ]
    first = asyncio.create_task(generate(http, here, *asked[0], terms))
    while not (await plugin_state(http, crowded.decode))["running"]:
        assert not first.done()
    ours = [await generate(http, here, *asked[1], terms), await first]
    there = crowded.monolithic.url
    alone = [await generate(http, there, *one, {}) for one in reversed(asked)]
    assert ours == alone
    assert (await plugin_state(http, crowded.decode))["requeued"] > 0
    await crowded.settle(http)


async def test_what_gave_way_is_not_refused_afterwards(
    crowded: Workers, http: aiohttp.ClientSession
) -> None:
    """Its cached prefix is taken by the decode that it made room for; its client may have seen
    the beginning of an answer by then."""
    await crowded.settle(http)
    assert crowded.monolithic is not None
    here, there = crowded.decode.url, crowded.monolithic.url
    held, anywhere = 900, LocalTerms(0).to_custom_params()
    long = [20 + i % 60 for i in range(1200)]
    await generate(http, here, long[:held], {"max_new_tokens": 1}, anywhere)
    decoding = {"max_new_tokens": 1400, "min_new_tokens": 1400}
    other = [10 + i % 70 for i in range(300)]
    before = await plugin_state(http, crowded.decode)
    first = asyncio.create_task(generate(http, here, other, decoding, anywhere))
    while not (await plugin_state(http, crowded.decode))["running"]:
        assert not first.done()
    terms = LocalTerms(held - crowded.page_size).to_custom_params()
    ours = [await generate(http, here, long, {}, terms), await first]
    assert ours == [
        await generate(http, there, long, {}, {}),
        await generate(http, there, other, decoding, {}),
    ]
    after = await plugin_state(http, crowded.decode)
    assert after["requeued"] > before["requeued"]
    assert after["evicted_while_waiting"] == before["evicted_while_waiting"]
    await crowded.settle(http)
