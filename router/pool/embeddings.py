"""Texts of searches and of points: vectors by a server, or by a model in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np

from ppd.ann.schedule import Stage
from ppd.ann.space import Rows

from ..embedder import Embedder
from .requests import rows_of

_AT_ONCE = 16  # texts of one request, before others have their turn
_IN_A_ROW = 8  # turns of prefill's, while decode's wait


class Embeddings(Protocol):
    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        """
        Raises:
            WorkerError: there is no answer, or none that makes sense.
        """
        ...


class ServedEmbeddings:
    """By a server of OpenAI's ``/v1/embeddings``."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        return np.asarray(rows_of(await self._embedder.embed(texts), "embedding"), np.float32)


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> Rows: ...


class LocalEmbeddings:
    """In this process, beside the searches: a few texts at a time, prefill's first."""

    def __init__(self, model: Encoder) -> None:
        self._model = model
        self._busy = False
        self._waiting: dict[Stage, deque[asyncio.Future[None]]] = {one: deque() for one in Stage}
        self._in_a_row = 0

    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        parts = []
        for start in range(0, len(texts), _AT_ONCE):
            async with self._turn(stage):
                some = texts[start : start + _AT_ONCE]
                parts.append(await asyncio.to_thread(self._model.encode, some))
        return np.concatenate(parts)

    @asynccontextmanager
    async def _turn(self, stage: Stage) -> AsyncIterator[None]:
        if self._busy:
            mine = asyncio.get_running_loop().create_future()
            self._waiting[stage].append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # it was given the turn just now
                    self._pass_on()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """To who waits longest among prefill's; now and then among decode's."""
        first = Stage.DECODE if self._in_a_row >= _IN_A_ROW else Stage.PREFILL
        for stage in sorted(Stage, key=lambda one: one is not first):
            while self._waiting[stage]:
                one = self._waiting[stage].popleft()
                if not one.cancelled():
                    self._in_a_row = self._in_a_row + 1 if stage is Stage.PREFILL else 0
                    one.set_result(None)
                    return
        self._busy = False
