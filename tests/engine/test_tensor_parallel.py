"""A decode server of two ranks: both must prefill, chunk and refuse alike, or they would hang."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from eval.cluster import Launcher
from ppd.contract import LocalTerms

from .generation import Generated, generate
from .workers import Workers, begin_stop, plugin_state, start_decode

_CHUNK = 256  # tokens, at most
# Python imports a module of this name when it starts. Ranks choose chunks after what they
# themselves have timed, which differs now and then. With this module it differs always.
_SITECUSTOMIZE = """
from ppd.pacing import Chunk, Pacer

chosen = Pacer.next_chunk

def next_chunk(self, rest, context):
    from torch.distributed import get_rank
    chunk = chosen(self, rest, context)
    return Chunk(chunk.tokens + 16 * get_rank(), chunk.decode_steps + 2 * get_rank(), chunk.mixed)

Pacer.next_chunk = next_chunk
"""
_PREFILLED = re.compile(r"local prefill: rid=(\S+) new=(\d+) cached=\d+ chunks=(\d+) ")


@pytest.fixture
def two_rank_workers(workers: Workers, launcher: Launcher, tmp_path: Path) -> Iterator[Workers]:
    """The shared workers, but a decode worker of two ranks that would choose different chunks."""
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    earlier = os.environ.get("PYTHONPATH")
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # else SGLang needs a NUMA node for each rank
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *([earlier] if earlier else [])]),
    }
    flags = ("--tp-size", "2", "--chunked-prefill-size", str(_CHUNK))
    decode = start_decode(workers, launcher, "two-ranks", *flags, environment=environment)
    yield replace(workers, decode=decode)
    begin_stop([decode])


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
