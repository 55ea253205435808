"""The other states of a scheduler: no overlap, chunks between decode steps, pages of 64,
priorities, grammars; and what holds in every state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eval.cluster import Launcher, Process, free_port, launching, wait_all
from eval.endpoints import vocabulary_of
from eval.engine.client import EngineClient, bootstrap_port_of
from eval.tiny_model import ModelSpec, ensure
from ppd.contract import LocalTerms, Role
from ppd.errors import WorkerError
from router.config.options import RouterConfig
from router.server.run import running
from sglang_patches.worker import plan_launch

from .conftest import STRICT, Workers, plugin_state
from .shaped import WITHOUT_OVERLAP, compare_shaped, generate
from .talk import Coin, Talk, Turn, script

ROUTER_PORT = free_port()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that differ in everything from the usual ones, and announce themselves.

    The monolithic one is without overlap too: with it, penalties count a token one step later.
    """
    model = ensure(ModelSpec())
    common = ("--page-size", "64", "--enable-metrics")
    herald = ("--ppd-routers", f"http://127.0.0.1:{ROUTER_PORT}")
    with launching(tmp_path_factory.mktemp("odd")) as launch:
        launch.environment |= STRICT
        prefill = start_overlapped_prefill(launch, model, common)
        schedule = ("--disable-overlap-schedule", "--enable-priority-scheduling")
        decode = launch.worker(Role.DECODE, model, *common, *herald, *schedule, "--ppd-alternate")
        alone = launch.worker(Role.REPLICA, model, *common, *schedule)
        wait_all(launch.started)
        yield Workers(prefill, decode, alone, 64, model)


def start_overlapped_prefill(launch: Launcher, model: Path, flags: Sequence[str]) -> Process:
    """As ``ppd-worker`` starts one, but with overlap, which it leaves out on a CPU."""
    port, bootstrap = free_port(), free_port()
    planned = plan_launch(
        Role.PREFILL,
        [
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--disaggregation-bootstrap-port", str(bootstrap), *flags),
        ],
        cpu=True,
        environment={},
        float32=True,
        options={"PPD_ROUTERS": f"http://127.0.0.1:{ROUTER_PORT}"},
    )
    argv = [part for part in planned.argv if part != "--disable-overlap-schedule"]
    assert len(argv) == len(planned.argv) - 1
    before, launch.environment = launch.environment, {**launch.environment, **planned.environment}
    try:
        return launch.start("prefill", port, argv)
    finally:
        launch.environment = before


async def client_of(http: aiohttp.ClientSession, workers: Workers) -> EngineClient:
    port = await bootstrap_port_of(http, workers.prefill.url)
    rooms = random.Random(1)
    return EngineClient(http, workers.prefill.url, workers.decode.url, port, rooms)


async def test_ids_do_not_depend_on_the_route_there_either(
    odd: Workers, http: aiohttp.ClientSession
) -> None:
    async def hold(url: str, seed: int) -> list[Turn]:
        talk = Talk(http, url, extra={"priority": seed % 3})
        for text in script(seed, 4):
            await talk.say(text)
        return talk.turns

    await odd.settle(http)
    assert odd.monolithic is not None
    async with odd.routed(Coin(random.Random(5))) as url:
        ours = await asyncio.gather(*(hold(url, seed) for seed in range(12)))
    for seed, turns in enumerate(ours):
        alone = await hold(odd.monolithic.url, seed)
        assert [t.ids for t in turns] == [t.ids for t in alone], f"conversation {seed}"
    assert {t.route for turns in ours for t in turns[1:]} == {"remote", "local"}
    await odd.settle(http)


@pytest.mark.parametrize("fields", WITHOUT_OVERLAP, ids=lambda fields: next(iter(fields)))
async def test_what_shapes_a_reply_shapes_a_local_one(
    odd: Workers, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    await compare_shaped(odd, http, fields)


async def test_one_tenants_cache_is_not_anothers(odd: Workers, http: aiohttp.ClientSession) -> None:
    await odd.settle(http)
    ids = [10 + i % 60 for i in range(400)]
    for key, least, status in (("a", 0, 200), ("a", 320, 200), ("b", 320, 503), (None, 320, 503)):
        body = {
            "input_ids": ids,
            "extra_key": key,
            "sampling_params": {
                "max_new_tokens": 2,
                "custom_params": LocalTerms(least).to_custom_params(),
            },
        }
        async with http.post(f"{odd.decode.url}/generate", json=body) as response:
            assert response.status == status, (key, await response.text())
    await odd.settle(http)


async def test_the_engines_metrics_tell_of_local_prefills(
    odd: Workers, http: aiohttp.ClientSession
) -> None:
    await odd.settle(http)
    client = await client_of(http, odd)
    before = await plugin_state(http, odd.decode)
    ids = random.Random(3).choices(await vocabulary_of(http, odd.decode.url), k=700)
    await client.local(ids[:600], 2)
    await client.local(ids, 2, min_cached=512)
    with pytest.raises(WorkerError, match="too_few_cached_tokens"):
        await client.local(ids[::-1], 2, min_cached=512)
    await odd.settle(http)
    after = await plugin_state(http, odd.decode)
    grown = {name: after[name] - before[name] for name in ("accepted", "prefilled", "chunks")}
    assert grown == {"accepted": 2, "prefilled": 2, "chunks": 3}, "600 in chunks of 512; 124"
    async with http.get(f"{odd.decode.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()

    def value(name: str, *labels: str) -> float:
        found = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name + "{") and all(label in line for label in labels)
        ]
        assert len(found) == 1, (name, found)
        return found[0]

    total = "ppd_engine_local_prefills_total"
    assert value(total, 'outcome="prefilled"') == after["prefilled"]
    assert value(total, 'outcome="too_few_cached_tokens"') == after["too_few_cached_tokens"] > 0
    assert value("ppd_engine_uncached_tokens_sum") == after["uncached_tokens"]
    assert value("ppd_engine_chunk_tokens_count") == after["chunks"]
    assert value("ppd_engine_queue_seconds_count") == after["prefilled"]
    log = odd.decode.log.read_text()
    assert "local prefill: rid=" in log
    assert " new=124 cached=576 chunks=1 queued=" in log


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alternating"])
async def test_decodes_go_on_beside_a_long_append(
    odd: Workers, bpe_workers: Workers, http: aiohttp.ClientSession, mixed: bool
) -> None:
    """Bounded chunks: no starvation either way, and a full chunk where nothing decodes."""
    workers = bpe_workers if mixed else odd
    await workers.settle(http)
    client = await client_of(http, workers)
    vocabulary = await vocabulary_of(http, workers.decode.url)
    source = random.Random(1)
    prompts = [source.choices(vocabulary, k=100) for _ in range(4)]
    async with client.decoding(prompts, most=20_000) as decoding:
        for _ in range(3):  # the pacer learns what chunks cost here
            await decoding[0].reaches(len(decoding[0].arrived_s) + 20)
            before = await plugin_state(http, workers.decode)
            begun = [len(reply.arrived_s) for reply in decoding]
            await client.local(source.choices(vocabulary, k=2500), 1)
            tokens = [len(r.arrived_s) - n for r, n in zip(decoding, begun, strict=True)]
            after = await plugin_state(http, workers.decode)
            chunks = after["chunks"] - before["chunks"]
    assert chunks >= 5, "never more than a full one; how much less is a matter of time"
    assert min(tokens) >= chunks - 2, "each chunk had at least one decode step"
    await workers.settle(http)
    before = await plugin_state(http, workers.decode)
    await client.local(source.choices(vocabulary, k=2500), 1)
    after = await plugin_state(http, workers.decode)
    assert after["chunks"] - before["chunks"] == 5
    await workers.settle(http)


async def test_the_waiting_timeout_and_the_load_see_the_local_queue(
    slow: Workers, http: aiohttp.ClientSession
) -> None:
    client = await client_of(http, slow)
    vocabulary = await vocabulary_of(http, slow.decode.url)
    source = random.Random(1)
    async with client.decoding([source.choices(vocabulary, k=60)], most=20_000) as decoding:
        await decoding[0].reaches(20)
        first = asyncio.create_task(client.local(source.choices(vocabulary, k=8000), 1))
        while not (await plugin_state(http, slow.decode))["prefilling"]:
            assert not first.done()
        second = asyncio.create_task(client.local(source.choices(vocabulary, k=200), 1))
        while not (await plugin_state(http, slow.decode))["waiting"]:
            assert not second.done()
        with pytest.raises(WorkerError, match="waiting timeout"):
            await second
        await first
    assert (await plugin_state(http, slow.decode))["aborted"] == 1
    await slow.settle(http)


@pytest.fixture
async def slow(
    tmp_path_factory: pytest.TempPathFactory, bpe_workers: Workers
) -> AsyncIterator[Workers]:
    """A decode server with the smallest chunks, on which nothing may wait for a second."""
    with launching(tmp_path_factory.mktemp("slow")) as launch:
        launch.environment |= STRICT | {"SGLANG_REQ_WAITING_TIMEOUT": "1"}
        flags = ("--page-size", "1", "--ppd-append-chunk", "16")
        decode = launch.worker(Role.DECODE, bpe_workers.model, *flags)
        wait_all([decode])
        yield Workers(bpe_workers.prefill, decode, None, 1, bpe_workers.model)


async def test_a_prefill_server_with_overlap_sends_what_it_held_before(
    odd: Workers, http: aiohttp.ClientSession
) -> None:
    """It holds the opening, the decode server does not: 0.5.21 dies of that on a CPU."""
    await odd.settle(http)
    assert odd.monolithic is not None
    client = await client_of(http, odd)
    opening = [10 + i % 70 for i in range(500)]
    await client.remote(opening, 4)
    for new in ([20, 21], [30, 31, 32]):
        ids = [*opening, *new]
        whole = await client.remote(ids, 16, whole=True)
        alone, _ = await generate(
            http, odd.monolithic.url, ids, {"max_new_tokens": 16, "ignore_eos": True}, {}
        )
        assert whole.ids == alone
    await odd.settle(http)


async def test_workers_announce_themselves_and_say_goodbye(
    odd: Workers, http: aiohttp.ClientSession
) -> None:
    """The last one here: it ends the decode server."""
    config = RouterConfig(port=ROUTER_PORT, policy="full", accept_workers=True)
    async with running(config) as url:  # it opens when both have announced themselves
        talk = Talk(http, url)
        await talk.say("Nobody told this router of any worker. " * 5)
        assert (await talk.say("And yet?")).route == "local"
        async with http.get(f"{url}/workers") as answer:
            told = {worker["role"]: worker["announced"] for worker in await answer.json()}
        assert told["decode"]["url"] == odd.decode.url
        assert told["decode"]["capabilities"] == ["local_prefill"]
        assert told["decode"]["load"]["kv_total_tokens"] == 65536
        assert told["decode"]["versions"]["sglang"].startswith("0.5.")
        assert (told["prefill"]["page_size"], told["prefill"]["capabilities"]) == (64, [])
        odd.decode.popen.terminate()
        async with asyncio.timeout(9.0):  # before it could be dropped for its silence
            while "decode" in await roles(http, url):
                pass
    await asyncio.to_thread(odd.decode.popen.wait, 60)
    assert f"announced to {config_url()} as {odd.decode.url}" in odd.decode.log.read_text()


async def roles(http: aiohttp.ClientSession, url: str) -> set[str]:
    async with http.get(f"{url}/workers") as answer:
        return {worker["role"] for worker in await answer.json()}


def config_url() -> str:
    return f"http://127.0.0.1:{ROUTER_PORT}"
