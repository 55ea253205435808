"""Local turns on a decode server that decodes speculatively (EAGLE, EAGLE-3; SGLang 0.5.23)."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from eval.cluster import Launcher
from eval.draft_model import STEPS, DraftSpec, draft_flags, ensure_pair
from eval.tiny_layers import Family
from eval.tiny_model import ModelSpec
from ppd.contract import LocalTerms, Role
from ppd.policies import static_policy
from sglang_patches.engines import ENGINES

from .conversation import Conversation, RandomRoutes, user_messages
from .generation import CONSTRAINTS, compare_constrained
from .reference import greedy_ids, reference_model
from .routes import RouteClient, random_ids
from .speculation import start_speculating
from .test_trouble import decoding_on_d, post
from .workers import (
    Workers,
    begin_stop,
    metric,
    plugin_state,
    start_decode,
    wait_ready,
    wait_until,
)

pytestmark = pytest.mark.skipif(
    not ENGINES[version("sglang")].speculative_algorithms,
    reason="this SGLang refuses speculation beside the decode radix cache",
)

# The draft that shares the target's layer, chunks and decode steps in turn; and a draft that
# depends on the hidden states, chunks mixed with decode steps where that is cheaper.
SHARING, NOISY = DraftSpec(), DraftSpec(hidden_gain=0.5)
MTP = DraftSpec(ModelSpec(family=Family.DEEPSEEK_V3))


class Cell(NamedTuple):
    """A draft, the page size, and whether chunks and decode steps take turns."""

    draft: DraftSpec
    page_size: int
    alternating: bool


_CELLS = [
    pytest.param(Cell(SHARING, 1, True), id="sharing-page1-alternating", marks=pytest.mark.matrix),
    pytest.param(Cell(NOISY, 16, False), id="noisy-page16-mixed"),
    pytest.param(Cell(MTP, 1, True), id="mtp-page1-alternating"),
    pytest.param(
        Cell(replace(MTP, hidden_gain=0.5), 16, False),
        id="mtp-noisy-page16-mixed",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        Cell(DraftSpec(eagle3=True, hidden_gain=0.5), 1, False),
        id="eagle3-page1-mixed",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        Cell(SHARING, 16, True), id="sharing-page16-alternating", marks=pytest.mark.matrix
    ),
    pytest.param(Cell(NOISY, 1, False), id="noisy-page1-mixed", marks=pytest.mark.matrix),
]
# Python imports a module of this name when it starts. With this one the draft of a local prefill
# sees hidden states of zero.
_NO_HIDDEN_STATES = """
import sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "sglang.srt.speculative.eagle_worker_v2":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            worker = module.EagleDraftWorker
            extend = worker._draft_extend_for_prefill
            def without(self, batch, hidden, *args, **kwargs):
                return extend(self, batch, hidden * 0, *args, **kwargs)
            worker._draft_extend_for_prefill = without
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module", params=_CELLS)
def cell(request: pytest.FixtureRequest) -> Cell:
    found: Cell = request.param
    return found


@pytest.fixture(scope="module")
def workers(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers of a target with a draft; the decode worker's chunks are small."""
    flags = ("--chunked-prefill-size", "256", *(("--ppd-alternate",) if cell.alternating else ()))
    logs = tmp_path_factory.mktemp("speculation")
    yield from start_speculating(cell.draft, logs, cell.page_size, flags)


def is_sharing(workers: Workers) -> bool:
    """Whether the workers' draft shares the target's layer."""
    return workers.model in (ensure_pair(SHARING)[0], ensure_pair(MTP)[0])


async def test_ids_are_those_of_the_target_alone(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    model = reference_model(workers.model)
    prompts = [random_ids(seed, 200) for seed in range(3)]
    expected = [greedy_ids(model, ids, 40) for ids in prompts]
    await workers.settle(http)
    client = RouteClient(http, workers)
    for ids, reply in zip(prompts, expected, strict=True):
        assert (await client.alone(ids, 40)).ids == reply
    await workers.settle(http)


@pytest.mark.parametrize("at_once", [1, 4])
async def test_ids_and_acceptance_do_not_depend_on_the_route(
    workers: Workers, http: aiohttp.ClientSession, cell: Cell, at_once: int
) -> None:
    """A mixed chunk gives decodes one token, so histograms of concurrent turns may differ."""
    await workers.settle(http)
    client = RouteClient(http, workers)
    routes = ("remote", "local", "local", "remote", "local")
    got = await asyncio.gather(*(client.converse(seed, routes) for seed in range(at_once)))
    expected = [await client.converse(seed, ("alone",) * 5) for seed in range(at_once)]
    for replies, alone in zip(got, expected, strict=True):
        assert [r.ids for r in replies] == [r.ids for r in alone]
        if at_once == 1 or cell.alternating:
            assert [r.histogram for r in replies] == [r.histogram for r in alone]
            if is_sharing(workers):
                assert all(r.tokens_per_step > 2.5 for r in replies)
    await workers.settle(http)


async def test_a_router_predicts_what_is_cached(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    async with workers.routed(RandomRoutes(random.Random(5))) as url:
        routed = await asyncio.gather(
            *(Conversation(http, url).send_all(user_messages(seed, 4)) for seed in range(4))
        )
        missed = await metric(http, url, "ppd_cache_mispredictions_total")
    for seed, turns in enumerate(routed):
        alone = await Conversation(http, workers.monolithic.url).send_all(user_messages(seed, 4))
        assert [t.ids for t in turns] == [t.ids for t in alone]
    assert {t.route for turns in routed for t in turns[1:]} == {"remote", "local"}
    assert missed == 0
    await workers.settle(http)


async def test_a_long_append_is_chunked_beside_decodes(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    client = RouteClient(http, workers)
    before = await plugin_state(http, workers.decode)
    decodes = [asyncio.create_task(client.local(random_ids(i, 300), 200)) for i in range(3)]
    await wait_until(partial(decoding_on_d, http, workers), *decodes)
    appended = await client.local(random_ids(9, 2500), 40)
    assert appended.ids == (await client.alone(random_ids(9, 2500), 40)).ids
    for i, decode in enumerate(decodes):
        assert (await decode).ids == (await client.alone(random_ids(i, 300), 200)).ids
    state = await plugin_state(http, workers.decode)
    assert state["chunks"] - before["chunks"] > 4 + 2500 // 256
    await workers.settle(http)


@pytest.mark.parametrize("sampling", CONSTRAINTS, ids=lambda constraint: next(iter(constraint)))
async def test_what_shapes_a_reply_shapes_a_local_one(
    workers: Workers, http: aiohttp.ClientSession, cell: Cell, sampling: dict[str, Any]
) -> None:
    if "min_new_tokens" in sampling and not cell.alternating:
        pytest.skip("SGLang counts forwards for it, and a mixed chunk is one that gives one token")
    await compare_constrained(workers, http, sampling)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_turn_continues(
    workers: Workers, http: aiohttp.ClientSession, mode: str
) -> None:
    await workers.settle(http)
    client = RouteClient(http, workers)
    turn = asyncio.create_task(client.local(random_ids(1, 300), 400))
    await wait_until(partial(decoding_on_d, http, workers), turn)
    await post(http, workers.decode, "/pause_generation", {"mode": mode})
    await post(http, workers.decode, "/continue_generation", {})
    assert (await turn).ids == (await client.alone(random_ids(1, 300), 400)).ids
    await workers.settle(http)


async def test_an_aborted_turn_frees_its_kv(workers: Workers, http: aiohttp.ClientSession) -> None:
    await workers.settle(http)
    client = RouteClient(http, workers)
    turns = [asyncio.create_task(client.local(random_ids(i, 300), 400)) for i in range(4)]
    await wait_until(partial(decoding_on_d, http, workers), *turns)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    await workers.settle(http)


async def test_logprobs_are_those_of_a_monolithic_server(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    body = {"input_ids": random_ids(2, 300), "return_logprob": True, "logprob_start_len": 0}
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    found: list[list[Any]] = []
    for url, terms in (
        (workers.decode.url, LocalTerms(0).to_custom_params()),
        (workers.monolithic.url, None),
    ):
        parameters = {"sampling_params": sampling | {"custom_params": terms}}
        async with http.post(f"{url}/generate", json=body | parameters) as response:
            reply = await response.json()
            assert response.status == 200, reply
        meta = reply["meta_info"]
        found.append([*meta["input_token_logprobs"], *meta["output_token_logprobs"]])
    (local, alone) = ([(e[1], e[0] or 0.0) for e in rows] for rows in found)
    assert [token for token, _ in local] == [token for token, _ in alone]
    assert [p for _, p in local] == pytest.approx([p for _, p in alone], abs=1e-3)
    await workers.settle(http)


async def test_samples_are_distributed_as_the_targets(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Of three sampled tokens the first comes from a prefill, the others from verify steps."""
    import torch

    count, prompt = 1500, random_ids(3, 40)
    model = reference_model(workers.model)
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        likely = first.topk(60).indices
        then = model(torch.tensor([[*prompt, int(i)] for i in likely])).logits[:, -1].softmax(-1)
    expected = (first[likely, None] * then).sum(0) / float(first[likely].sum())

    await workers.settle(http)
    gate = asyncio.Semaphore(16)

    async def sample() -> list[int]:
        terms = LocalTerms(0).to_custom_params()
        params = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": {**params, "custom_params": terms}}
        async with gate, http.post(f"{workers.decode.url}/generate", json=body) as response:
            ids: list[int] = (await response.json())["output_ids"]
        return ids

    replies = await asyncio.gather(*(sample() for _ in range(count)))
    kept = [ids for ids in replies if ids[0] in set(likely.tolist())]
    seen = Counter(ids[1] for ids in kept)
    common = [i for i, p in enumerate(expected.tolist()) if p * len(kept) >= 5]
    statistic = sum(
        (seen[i] - len(kept) * p) ** 2 / (len(kept) * p)
        for i in common
        if (p := float(expected[i]))
    )
    # The statistic's mean is its number of terms, and its deviation the root of twice that.
    assert len(common) > 10
    assert statistic < len(common) + 5 * (2 * len(common)) ** 0.5
    await workers.settle(http)


async def test_greedy_turns_keep_their_ids_beside_sampled_ones(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    """In one batch with sampled requests a greedy one is sampled with the top k of 1."""
    await workers.settle(http)
    parameters = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    sampled_tokens = 90

    async def sample(seed: int) -> list[int]:
        terms = {"custom_params": LocalTerms(0).to_custom_params()}
        sampling = {**parameters, "max_new_tokens": sampled_tokens, "ignore_eos": True, **terms}
        body = {"input_ids": random_ids(seed, 60), "sampling_params": sampling}
        async with http.post(f"{workers.decode.url}/generate", json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
        ids: list[int] = reply["output_ids"]
        return ids

    client = RouteClient(http, workers)
    samples = asyncio.gather(*(sample(seed) for seed in range(3)))
    got = await client.converse(31, ("local", "remote", "local"))
    assert [len(ids) for ids in await samples] == [sampled_tokens] * 3
    alone = await client.converse(31, ("alone",) * 3)
    assert [r.ids for r in got] == [r.ids for r in alone]
    await workers.settle(http)


async def test_retracted_requests_of_both_kinds_continue(
    workers: Workers, launcher: Launcher, http: aiohttp.ClientSession
) -> None:
    """SGLang's test switch retracts a request in every fifth decode step."""
    flags = ("--max-total-tokens", "3504", "--chunked-prefill-size", "128")
    decode = start_decode(
        workers,
        launcher,
        "retracting-eagle",
        *(*flags, *_draft_flags(workers), "--disaggregation-decode-retraction-backup"),
        "cpu_tensor",
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"},
    )
    retracting = replace(workers, decode=decode)
    try:
        await retracting.settle(http)
        client = RouteClient(http, retracting)
        routes = ("remote", "local", "remote", "local")
        got = await asyncio.gather(*(client.converse(seed, routes) for seed in range(5)))
        for seed, replies in enumerate(got):
            alone = await client.converse(seed, ("alone",) * 4)
            assert [r.ids for r in replies] == [r.ids for r in alone], f"conversation {seed}"
        assert (await plugin_state(http, decode))["requeued"] > 0
        await retracting.settle(http)
    finally:
        begin_stop([decode])


async def test_hidden_states_that_are_lost_are_seen(
    workers: Workers, launcher: Launcher, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The comparison of histograms finds a fault that ids do not show."""
    if is_sharing(workers):
        pytest.skip("this draft does not depend on hidden states")
    (tmp_path / "sitecustomize.py").write_text(_NO_HIDDEN_STATES)
    earlier = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(tmp_path), *([earlier] if earlier else [])])
    decode = start_decode(
        workers, launcher, "no-hidden", *_draft_flags(workers), environment={"PYTHONPATH": paths}
    )
    try:
        client = RouteClient(http, replace(workers, decode=decode))
        routes = ("local",) * 4
        got = [await client.converse(seed, routes) for seed in range(3)]
        expected = [await client.converse(seed, ("alone",) * 4) for seed in range(3)]
        assert [[r.ids for r in turns] for turns in got] == [
            [r.ids for r in turns] for turns in expected
        ]
        assert [[r.histogram for r in turns] for turns in got] != [
            [r.histogram for r in turns] for turns in expected
        ]
    finally:
        begin_stop([decode])


def _draft_flags(workers: Workers) -> tuple[str, ...]:
    """The flags of the draft beside the workers' target."""
    kind = workers.model.parent.name.partition("-")[0]
    algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}[kind]
    return draft_flags(workers.model.parent / "draft", algorithm)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM"])
async def test_an_algorithm_without_a_transfer_path_is_refused(
    launcher: Launcher, algorithm: str
) -> None:
    """By SGLang itself, or by the plugin, with the algorithm's name."""
    target, _ = ensure_pair(SHARING)
    flags = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", str(STEPS)]
    if algorithm == "STANDALONE":
        flags = [*draft_flags(target, algorithm)]
    worker = launcher.worker(Role.DECODE, target, *flags, name=f"refused-{algorithm}")
    with pytest.raises(Exception, match=r"(?s)refused-.*"):
        wait_ready(worker)
    assert algorithm in worker.log.read_text()


async def test_turns_that_stay_local_keep_their_acceptance(
    workers: Workers, http: aiohttp.ClientSession
) -> None:
    await workers.settle(http)
    assert workers.monolithic is not None
    async with workers.routed(static_policy("full")) as url:
        turns = await Conversation(http, url, max_tokens=30).send_all(user_messages(11, 6))
    assert [t.route for t in turns[1:]] == ["local"] * 5
    alone = await Conversation(http, workers.monolithic.url, max_tokens=30).send_all(
        user_messages(11, 6)
    )
    assert [t.ids for t in turns] == [t.ids for t in alone]
    await workers.settle(http)
