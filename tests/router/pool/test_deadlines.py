"""Searches whose time is over before the engines see them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from router.pool.collection import Collection, Plan
from router.pool.filters import Filter

from .pools import ROWS, config_for, embedding, running

NOTHING_YET = {"hits": [], "degraded": True}


async def test_embedding_that_hangs_does_not_hold_the_answer_back(built: Path) -> None:
    gate = asyncio.Event()
    async with (
        embedding(lambda text: ROWS[0], [], gate) as url,
        running(config_for(built, embeddings_url=url)) as pool,
    ):
        status, reply = await pool.search(texts=["0", "1"], timeout_ms=20.0, stage="decode")
        assert (status, reply["results"]) == (200, [NOTHING_YET] * 2)
        gate.set()
        status, reply = await pool.search(text="0", limit=5)
        assert (status, reply["results"][0]["degraded"]) == (200, False)
        assert len(reply["results"][0]["hits"]) == 5
        _, metrics = await pool.get("/metrics")
        assert 'ppd_pool_searches_total{ending="deadline",stage="decode"} 2.0' in metrics


async def test_a_filter_that_takes_long_does_not_hold_the_answer_back(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), Collection.plan

    def slow(self: Collection, itopk: int, wanted: Filter | None) -> Plan:
        if wanted is not None:
            gate.wait()
        return real(self, itopk, wanted)

    monkeypatch.setattr(Collection, "plan", slow)
    async with running(config_for(built)) as pool:
        vector, wanted = ROWS[0].tolist(), {"lang": "en"}
        try:
            status, reply = await pool.search(vector=vector, filter=wanted, timeout_ms=20.0)
        finally:
            gate.set()
        assert (status, reply["results"]) == (200, [NOTHING_YET])
        assert len(await pool.ids(ROWS[0], filter=wanted, limit=5)) == 5
