"""Other settings of a scheduler: no overlap, alternating chunks, pages of 64, priorities.

Also what must hold with every setting.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from eval.cluster import Launcher, Process, free_port
from eval.endpoints import vocabulary_of
from eval.engine.client import EngineClient, bootstrap_port_of
from eval.tiny_model import ModelSpec, ensure
from ppd.contract import LocalTerms, Role
from ppd.errors import WorkerError
from router.config.options import RouterConfig
from router.server.run import running
from sglang_patches.worker import plan_launch

from .conversation import Conversation, RandomRoutes, user_messages
from .generation import CONSTRAINTS_WITHOUT_OVERLAP, compare_constrained, generate
from .workers import (
    Workers,
    begin_stop,
    extra_environment,
    plugin_state,
    start_decode,
    wait_ready,
    wait_until,
    worker_launcher,
)


@pytest.fixture(scope="module")
def router_url() -> str:
    """Where workers announce themselves; nothing listens there until a test starts a router."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def alternating_workers(
    tmp_path_factory: pytest.TempPathFactory, router_url: str
) -> Iterator[Workers]:
    """Workers that differ in every setting from the shared ones, and announce themselves.

    The monolithic server runs without overlap too: with it, penalties count a token one step
    later.
    """
    model = ensure(ModelSpec())
    common = ("--page-size", "64", "--enable-metrics")
    schedule = ("--disable-overlap-schedule", "--enable-priority-scheduling")
    with worker_launcher(tmp_path_factory.mktemp("alternating")) as launcher:
        prefill = start_overlapped_prefill(launcher, model, common, router_url)
        announced = ("--ppd-routers", router_url, "--ppd-alternate")
        decode = launcher.worker(Role.DECODE, model, *common, *schedule, *announced)
        monolithic = launcher.worker(Role.REPLICA, model, *common, *schedule)
        wait_ready(*launcher.started)
        yield Workers(prefill, decode, monolithic, 64, model)


def start_overlapped_prefill(
    launcher: Launcher, model: Path, flags: Sequence[str], router_url: str
) -> Process:
    """Start a prefill worker as ``ppd-worker`` does, but with overlap.

    ``ppd-worker`` leaves overlap out on a CPU.
    """
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
        options={"PPD_ROUTERS": router_url},
    )
    argv = [part for part in planned.argv if part != "--disable-overlap-schedule"]
    assert len(argv) == len(planned.argv) - 1
    with extra_environment(launcher, planned.environment):
        return launcher.start("prefill", port, argv)


@pytest.fixture(scope="module")
def slow_append_workers(bpe_workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The BPE workers, but a decode worker that appends slowly and has a short waiting timeout.

    Beside a decode it prefills 16 tokens in every 32 steps.
    """
    pace = ("--ppd-append-chunk", "16", "--prefill-decode-interval", "32")
    timeout = {"SGLANG_REQ_WAITING_TIMEOUT": "2"}  # seconds
    decode = start_decode(bpe_workers, launcher, "slow-append", *pace, environment=timeout)
    yield replace(bpe_workers, decode=decode)
    begin_stop([decode])


async def client_of(http: aiohttp.ClientSession, workers: Workers) -> EngineClient:
    """Make a client that sends turns to the workers themselves."""
    port = await bootstrap_port_of(http, workers.prefill.url)
    rooms = random.Random(1)
    return EngineClient(http, workers.prefill.url, workers.decode.url, port, rooms)


async def engine_metrics(http: aiohttp.ClientSession, worker: Process) -> list[str]:
    """Read the lines of a worker's ``/metrics``."""
    async with http.get(f"{worker.url}/metrics") as response:
        return (await response.text()).splitlines()


def value_of(lines: list[str], name: str, *labels: str) -> float:
    """Find the one series with this name and these labels, and read its value.

    Raises:
        AssertionError: none or several have them.
    """
    found = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name + "{") and all(label in line for label in labels)
    ]
    assert len(found) == 1, (name, found)
    return found[0]


async def test_ids_do_not_depend_on_the_route_there_either(
    alternating_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = alternating_workers
    assert workers.monolithic is not None
    monolithic = workers.monolithic.url

    async def converse(url: str, seed: int) -> list[list[int]]:
        conversation = Conversation(http, url, extra_fields={"priority": seed % 3})
        turns = await conversation.send_all(user_messages(seed, 4))
        if url != monolithic:
            routes.update(turn.route for turn in turns[1:])
        return [turn.ids for turn in turns]

    routes: set[str] = set()
    await workers.settle(http)
    async with workers.routed(RandomRoutes(random.Random(5))) as url:
        replies = await asyncio.gather(*(converse(url, seed) for seed in range(12)))
    for seed, ids in enumerate(replies):
        assert ids == await converse(monolithic, seed), f"conversation {seed}"
    assert routes == {"remote", "local"}
    await workers.settle(http)


@pytest.mark.parametrize(
    "fields", CONSTRAINTS_WITHOUT_OVERLAP, ids=lambda fields: next(iter(fields))
)
async def test_what_shapes_a_reply_shapes_a_local_one(
    alternating_workers: Workers, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    await compare_constrained(alternating_workers, http, fields)


async def test_one_tenants_cache_is_not_anothers(
    alternating_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = alternating_workers
    await workers.settle(http)
    ids = [10 + i % 60 for i in range(400)]
    requests = (("a", 0, 200), ("a", 320, 200), ("b", 320, 503), (None, 320, 503))
    for key, min_cached, status in requests:
        body = {
            "input_ids": ids,
            "extra_key": key,
            "sampling_params": {
                "max_new_tokens": 2,
                "custom_params": LocalTerms(min_cached).to_custom_params(),
            },
        }
        async with http.post(f"{workers.decode.url}/generate", json=body) as response:
            assert response.status == status, (key, await response.text())
    await workers.settle(http)


async def test_the_engines_metrics_tell_of_local_prefills(
    alternating_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = alternating_workers
    await workers.settle(http)
    client = await client_of(http, workers)
    before = await plugin_state(http, workers.decode)
    ids = random.Random(3).choices(await vocabulary_of(http, workers.decode.url), k=700)
    await client.local(ids[:600], 2)
    await client.local(ids, 2, min_cached=512)
    with pytest.raises(WorkerError, match="too_few_cached_tokens"):
        await client.local(ids[::-1], 2, min_cached=512)
    await workers.settle(http)
    after = await plugin_state(http, workers.decode)
    added = {name: after[name] - before[name] for name in ("accepted", "prefilled", "chunks")}
    assert added == {"accepted": 2, "prefilled": 2, "chunks": 3}, "600 in chunks of 512; 124"
    lines = await engine_metrics(http, workers.decode)
    total = "ppd_engine_local_prefills_total"
    refused = "too_few_cached_tokens"
    assert value_of(lines, total, 'outcome="prefilled"') == after["prefilled"]
    assert value_of(lines, total, f'outcome="{refused}"') == after[refused] > 0
    assert value_of(lines, "ppd_engine_uncached_tokens_sum") == after["uncached_tokens"]
    assert value_of(lines, "ppd_engine_chunk_tokens_count") == after["chunks"]
    assert value_of(lines, "ppd_engine_queue_seconds_count") == after["prefilled"]
    log = workers.decode.log.read_text()
    assert "local prefill: rid=" in log
    assert " new=124 cached=576 chunks=1 queued=" in log


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alternating"])
async def test_decodes_go_on_beside_a_long_append(
    alternating_workers: Workers, bpe_workers: Workers, http: aiohttp.ClientSession, mixed: bool
) -> None:
    """Chunks are bounded: neither side starves, and chunks are full where nothing decodes."""
    workers = bpe_workers if mixed else alternating_workers
    await workers.settle(http)
    client = await client_of(http, workers)
    vocabulary = await vocabulary_of(http, workers.decode.url)
    source = random.Random(1)
    prompts = [source.choices(vocabulary, k=100) for _ in range(4)]

    async def chunks_and_gaps() -> tuple[int, float]:
        """Chunks so far, and times that running decodes got a token after one or more chunks."""
        chunks = (await plugin_state(http, workers.decode))["chunks"]
        lines = await engine_metrics(http, workers.decode)
        return chunks, value_of(lines, "ppd_engine_decode_gap_seconds_count")

    async with client.decoding(prompts, max_tokens=20_000) as decoding:
        for _ in range(3):  # the pacer's estimate of what chunks cost improves
            await decoding[0].reaches(len(decoding[0].arrived_s) + 20)
            chunks_before, gaps_before = await chunks_and_gaps()
            await client.local(source.choices(vocabulary, k=2500), 1)
            chunks_after, gaps_after = await chunks_and_gaps()
            chunks = chunks_after - chunks_before
            gaps = gaps_after - gaps_before
            # Counted by the engine: a slow client finds several tokens in one event.
            assert gaps >= chunks - 1, "each chunk but the last had a decode step of its own"
    assert chunks >= 5, "never more than a full one; how much less is a matter of time"
    await workers.settle(http)
    before = await plugin_state(http, workers.decode)
    await client.local(source.choices(vocabulary, k=2500), 1)
    after = await plugin_state(http, workers.decode)
    assert after["chunks"] - before["chunks"] == 5
    await workers.settle(http)


async def test_the_waiting_timeout_and_the_load_see_the_local_queue(
    slow_append_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = slow_append_workers
    client = await client_of(http, workers)
    vocabulary = await vocabulary_of(http, workers.decode.url)
    source = random.Random(1)

    async def is_prefilling() -> bool:
        return bool((await plugin_state(http, workers.decode))["prefilling"])

    async def is_waiting() -> bool:
        return bool((await plugin_state(http, workers.decode))["waiting"])

    async with client.decoding([source.choices(vocabulary, k=60)], max_tokens=20_000) as decoding:
        await decoding[0].reaches(20)
        first = asyncio.create_task(client.local(source.choices(vocabulary, k=8000), 1))
        await wait_until(is_prefilling, first)
        second = asyncio.create_task(client.local(source.choices(vocabulary, k=200), 1))
        await wait_until(is_waiting, second)
        with pytest.raises(WorkerError, match="waiting timeout"):
            await second
        assert not first.done()
    await first  # in full chunks, as nothing decodes any more
    assert (await plugin_state(http, workers.decode))["aborted"] == 1
    await workers.settle(http)


async def test_a_prefill_server_with_overlap_sends_what_it_held_before(
    alternating_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """The prefill server holds the opening, the decode server does not.

    SGLang 0.5.21 exits in that case on a CPU.
    """
    workers = alternating_workers
    await workers.settle(http)
    assert workers.monolithic is not None
    client = await client_of(http, workers)
    opening = [10 + i % 70 for i in range(500)]
    await client.remote(opening, 4)
    sampling = {"max_new_tokens": 16, "ignore_eos": True}
    for new in ([20, 21], [30, 31, 32]):
        ids = [*opening, *new]
        reply = await client.remote(ids, 16, whole=True)
        expected, _ = await generate(http, workers.monolithic.url, ids, sampling, {})
        assert reply.ids == expected
    await workers.settle(http)


async def test_workers_announce_themselves_and_say_goodbye(
    alternating_workers: Workers, router_url: str, http: aiohttp.ClientSession
) -> None:
    """The last test here: it ends the decode server."""
    decode = alternating_workers.decode
    port = urlsplit(router_url).port
    assert port is not None
    # Nothing is dropped for want of heartbeats: a worker that is gone has announced its end.
    config = RouterConfig(port=port, policy="full", accept_workers=True, heartbeat_budget_s=3600.0)
    async with running(config) as url:  # it opens when both have announced themselves
        conversation = Conversation(http, url)
        await conversation.send("This router starts without workers. " * 5)
        assert (await conversation.send("And yet?")).route == "local"
        announced = await announcements(http, url)
        assert announced["decode"]["url"] == decode.url
        assert announced["decode"]["capabilities"] == ["local_prefill"]
        assert announced["decode"]["load"]["kv_total_tokens"] == 65536
        assert announced["decode"]["versions"]["sglang"].startswith("0.5.")
        assert announced["prefill"]["page_size"] == 64
        assert announced["prefill"]["capabilities"] == []

        async def has_left() -> bool:
            return "decode" not in await announcements(http, url)

        decode.popen.terminate()
        await wait_until(has_left)
    await asyncio.to_thread(decode.popen.wait, 60)
    assert f"announced to {router_url} as {decode.url}" in decode.log.read_text()


async def announcements(http: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    """Read the last announcement of each of a router's workers, by role."""
    async with http.get(f"{url}/workers") as response:
        return {worker["role"]: worker["announced"] for worker in await response.json()}
