"""Texts that are embedded in the pool itself: who comes first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ppd.ann.schedule import Stage
from ppd.ann.space import Rows
from ppd.errors import ConfigError
from router.pool.embeddings import LocalEmbeddings, OnFirstText

from ..fixtures import until


class Slow:
    """Embeds when the gate is open, and writes down what came when."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.came: list[str] = []

    def encode(self, texts: Sequence[str]) -> Rows:
        self.begun.set()
        self.gate.wait()
        self.came += texts
        return np.array([[float(len(text))] for text in texts], np.float32)


async def waiting(count: int, stage: Stage, one: LocalEmbeddings) -> None:
    """Until so many wait for their turn."""

    async def are() -> bool:
        await asyncio.sleep(0)  # lets them come
        return len(one._waiting[stage]) == count

    await until(are)


async def test_prefill_comes_first_and_decode_comes_too() -> None:
    model = Slow()
    one = LocalEmbeddings(model)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.embed(["first"], Stage.DECODE))
        await asyncio.to_thread(model.begun.wait)
        for i in range(3):
            tasks.create_task(one.embed([f"d{i}"], Stage.DECODE))
        gone = tasks.create_task(one.embed(["gone"], Stage.PREFILL))
        for i in range(10):
            tasks.create_task(one.embed([f"p{i}"], Stage.PREFILL))
        await waiting(3, Stage.DECODE, one)
        await waiting(11, Stage.PREFILL, one)
        gone.cancel()
        model.gate.set()
    prefill = [f"p{i}" for i in range(10)]
    assert model.came == ["first", *prefill[:8], "d0", *prefill[8:], "d1", "d2"]


async def test_a_long_request_lets_others_between() -> None:
    model = Slow()
    one = LocalEmbeddings(model)
    texts = ["x" * i for i in range(1, 41)]
    async with asyncio.TaskGroup() as tasks:
        long = tasks.create_task(one.embed(texts, Stage.DECODE))
        await asyncio.to_thread(model.begun.wait)
        tasks.create_task(one.embed(["short"], Stage.PREFILL))
        await waiting(1, Stage.PREFILL, one)
        model.gate.set()
    assert model.came.index("short") == 16
    assert long.result()[:, 0].tolist() == [float(i) for i in range(1, 41)]


async def test_who_leaves_gives_the_turn_on_when_his_texts_are_done() -> None:
    """A thread cannot be stopped: two would share the cores that searches need."""
    model = Slow()
    one = LocalEmbeddings(model)
    gone = asyncio.ensure_future(one.embed(["gone"], Stage.PREFILL))
    await asyncio.to_thread(model.begun.wait)
    model.begun.clear()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    stays = asyncio.ensure_future(one.embed(["stays"], Stage.PREFILL))
    await waiting(1, Stage.PREFILL, one)
    assert not model.begun.is_set()
    model.gate.set()
    await stays
    assert model.came == ["gone", "stays"]


def test_the_default_model_is_loaded_once_with_the_first_text() -> None:
    model, loaded = Slow(), []
    model.gate.set()

    def load() -> Slow:
        loaded.append(1)
        return model

    one = OnFirstText(load)
    assert not loaded
    for text in ("a", "b"):
        one.encode([text])
    assert (len(loaded), model.came) == (1, ["a", "b"])


def test_a_model_that_cannot_be_had_is_not_fetched_for_each_text() -> None:
    tries = []

    def load() -> Slow:
        tries.append(1)
        raise ConfigError("no network")

    one = OnFirstText(load)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no network"):
            one.encode(["a"])
    assert len(tries) == 1
