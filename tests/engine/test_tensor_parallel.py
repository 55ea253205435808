"""A decode server of two ranks: both prefill, chunk and refuse alike, or they would hang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from eval.cluster import Launcher, wait_all
from ppd.contract import LocalTerms, Role

from .conftest import Workers, plugin_state
from .shaped import generate

# Python imports a module of this name when it starts. Ranks choose after what they themselves have
# timed, which differs now and then: with this, always.
_SITECUSTOMIZE = """
from ppd.pacing import Chunk, Pacer

chosen = Pacer.next_chunk

def next_chunk(self, rest, context):
    from torch.distributed import get_rank
    chunk = chosen(self, rest, context)
    return Chunk(chunk.tokens + 16 * get_rank(), chunk.decode_steps + 2 * get_rank())

Pacer.next_chunk = next_chunk
"""


@pytest.fixture
def two_ranks(workers: Workers, launcher: Launcher, tmp_path: Path) -> Iterator[Workers]:
    """Two ranks that would choose different chunks."""
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    added = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # or it wants a NUMA node a rank
        "PYTHONPATH": str(tmp_path),
    }
    launcher.environment |= added
    decode = launcher.worker(
        *(Role.DECODE, workers.model, "--page-size", str(workers.page_size)),
        *("--tp-size", "2", "--chunked-prefill-size", "256"),
        name="two-ranks",
    )
    for name in added:
        del launcher.environment[name]
    wait_all([decode])
    yield replace(workers, decode=decode)
    decode.stop()


async def test_local_turns_on_two_ranks(two_ranks: Workers, http: aiohttp.ClientSession) -> None:
    """Conversations side by side, so that chunks and decodes mix; ids as of one rank alone."""
    await two_ranks.settle(http)
    assert two_ranks.monolithic is not None

    async def talk(url: str, seed: int, *, local: bool) -> list[tuple[list[int], str]]:
        history = [10 + (seed * 7 + i) % 70 for i in range(300 + 40 * seed)]
        replies, held = [], 0
        for turn in range(3):
            terms = LocalTerms(held).to_custom_params() if local else {}
            replies.append(await generate(http, url, history, {"ignore_eos": True}, terms))
            held = len(history) // 16 * 16
            history = [*history, *replies[-1][0], *([20 + seed + turn] * 30)]
        return replies

    ours = await asyncio.gather(*(talk(two_ranks.decode.url, i, local=True) for i in range(6)))
    alone = [await talk(two_ranks.monolithic.url, i, local=False) for i in range(6)]
    assert ours == alone
    state = await plugin_state(http, two_ranks.decode)
    assert state["prefilled"] == 18
    assert state["chunks"] > 18
    await two_ranks.settle(http)
