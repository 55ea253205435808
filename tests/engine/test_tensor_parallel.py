"""Servers of two ranks: both ranks must do alike, and KV must cross between unequal servers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest

from eval.cluster import Launcher
from ppd.contract import LocalTerms, Role

from .generation import Generated, generate
from .routes import RouteClient
from .workers import (
    Workers,
    begin_stop,
    extra_environment,
    plugin_state,
    start_decode,
    wait_ready,
)

_CHUNK = 256  # tokens, at most
# Else SGLang needs a NUMA node for each rank.
_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
# Python imports a module of this name when it starts. Ranks choose chunks after what they
# themselves have timed, which differs now and then. With this module it differs always.
_SITECUSTOMIZE = """
from ppd.pacing import Chunk, Pacer

chosen = Pacer.next_chunk

def next_chunk(self, rest, context, behind=0):
    from torch.distributed import get_rank
    chunk = chosen(self, rest, context, behind)
    return Chunk(chunk.tokens + 16 * get_rank(), chunk.decode_steps + 2 * get_rank(), chunk.mixed)

Pacer.next_chunk = next_chunk
"""
_PREFILLED = re.compile(r"local prefill: rid=(\S+) new=(\d+) cached=\d+ chunks=(\d+) ")


@pytest.fixture(scope="module")
def two_rank_workers(
    workers: Workers, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """The shared workers, but a decode worker of two ranks that would choose different chunks."""
    folder = tmp_path_factory.mktemp("two-ranks")
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    earlier = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(folder), *([earlier] if earlier else [])])
    environment = {**_TWO_RANKS, "PYTHONPATH": paths}
    flags = ("--tp-size", "2", "--chunked-prefill-size", str(_CHUNK))
    decode = start_decode(workers, launcher, "two-ranks", *flags, environment=environment)
    yield replace(workers, decode=decode)
    begin_stop([decode])


@pytest.fixture(
    scope="module", params=["prefill", pytest.param("decode", marks=pytest.mark.matrix)]
)
def unequal_workers(
    request: pytest.FixtureRequest, workers: Workers, launcher: Launcher
) -> Iterator[Workers]:
    """The shared workers, but one of them has two ranks."""
    name = f"two-ranks-{request.param}"
    if request.param == "decode":
        flags = ("--tp-size", "2", "--chunked-prefill-size", str(_CHUNK))
        worker = start_decode(workers, launcher, name, *flags, environment=_TWO_RANKS)
        yield replace(workers, decode=worker)
    else:
        flags = ("--page-size", str(workers.page_size), "--tp-size", "2")
        with extra_environment(launcher, _TWO_RANKS):
            worker = launcher.worker(Role.PREFILL, workers.model, *flags, name=name)
        wait_ready(worker)
        yield replace(workers, prefill=worker)
    begin_stop([worker])


def chunks_of_prefills(log: str) -> dict[str, list[tuple[int, int]]]:
    """Read tokens and chunks of each local prefill from a log, by request; one for each rank."""
    found: dict[str, list[tuple[int, int]]] = {}
    for rid, tokens, chunks in _PREFILLED.findall(log):
        found.setdefault(rid, []).append((int(tokens), int(chunks)))
    return found


async def test_local_turns_on_two_ranks(
    two_rank_workers: Workers, http: aiohttp.ClientSession
) -> None:
    """Conversations run side by side, so that chunks and decodes mix; ids are one rank's."""
    workers = two_rank_workers
    await workers.settle(http)
    assert workers.monolithic is not None

    async def converse(url: str, seed: int, *, local: bool) -> list[Generated]:
        history = [10 + (seed * 7 + i) % 70 for i in range(300 + 40 * seed)]
        replies: list[Generated] = []
        held_tokens = 0
        for turn in range(3):
            terms = LocalTerms(held_tokens).to_custom_params() if local else {}
            replies.append(await generate(http, url, history, {"ignore_eos": True}, terms))
            held_tokens = len(history) // 16 * 16
            history = [*history, *replies[-1][0], *([20 + seed + turn] * 30)]
        return replies

    decode, monolithic = workers.decode.url, workers.monolithic.url
    replies = await asyncio.gather(*(converse(decode, i, local=True) for i in range(6)))
    expected = [await converse(monolithic, i, local=False) for i in range(6)]
    assert replies == expected
    state = await plugin_state(http, workers.decode)
    assert state["prefilled"] == 18
    # Requests may share a chunk, so that the number of all chunks depends on their times of
    # arrival. A request with more tokens than a chunk needs several, whatever it shares.
    prefills = chunks_of_prefills(workers.decode.log.read_text())
    assert len(prefills) == 18
    for first_rank, second_rank in prefills.values():
        assert first_rank == second_rank
        tokens, chunks = first_rank
        assert chunks >= -(-tokens // _CHUNK)
    assert sum(chunks for (_, chunks), _ in prefills.values()) > 18
    assert state["longest_decode_gap_ms"] > 0, "no chunk ran beside a decode"
    await workers.settle(http)


@pytest.mark.parametrize("first_tokens", [200, 2500])
async def test_kv_crosses_between_servers_of_one_and_two_ranks(
    unequal_workers: Workers, http: aiohttp.ClientSession, first_tokens: int
) -> None:
    """First turns, local turns after them, and remote turns after those, one and three at once."""
    workers = unequal_workers
    await workers.settle(http)
    client = RouteClient(http, workers)
    routes = ("remote", "local", "remote", "remote", "local")
    for seeds in ([1], [2, 3, 4]):
        got = await asyncio.gather(
            *(client.converse(seed, routes, first_tokens=first_tokens) for seed in seeds)
        )
        for seed, replies in zip(seeds, got, strict=True):
            alone = await client.converse(seed, ("alone",) * len(routes), first_tokens=first_tokens)
            assert [r.ids for r in replies] == [r.ids for r in alone], f"conversation {seed}"
    await workers.settle(http)
