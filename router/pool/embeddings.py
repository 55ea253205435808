"""Texts of searches and of points: vectors by a server, or by a model in this process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ppd.ann.schedule import Stage
from ppd.ann.space import Rows
from ppd.errors import PpdError

from ..embedder import Embedder
from .requests import rows_of

_AT_ONCE = 16  # texts of one request, before others have their turn
_IN_A_ROW = 8  # turns of prefill's, while decode's wait
_REST_S = 60.0  # after which a model that could not be loaded is tried again


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


class OnFirstText:
    """A model that is loaded when a text comes, if ever one does. For one thread at a time."""

    def __init__(self, load: Callable[[], Encoder]) -> None:
        self._load = load
        self._model: Encoder | None = None
        self._failed: tuple[float, PpdError] | None = None

    def encode(self, texts: Sequence[str]) -> Rows:
        """
        Raises:
            PpdError: it cannot be loaded.
        """
        if self._model is None:
            if self._failed is not None and time.monotonic() < self._failed[0]:
                raise self._failed[1].with_traceback(None)
            try:
                self._model = self._load()
            except PpdError as error:
                self._failed = time.monotonic() + _REST_S, error
                raise
        return self._model.encode(texts)


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
            await self._turn(stage)
            some = texts[start : start + _AT_ONCE]
            encoding = asyncio.ensure_future(asyncio.to_thread(self._model.encode, some))
            encoding.add_done_callback(self._end_turn)
            parts.append(await asyncio.shield(encoding))  # a thread cannot be stopped
        return np.concatenate(parts)

    async def _turn(self, stage: Stage) -> None:
        """Wait for it; it is over when what was begun in it has ended, whoever waits for that."""
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

    def _end_turn(self, encoding: asyncio.Future[Rows]) -> None:
        if not encoding.cancelled():
            encoding.exception()  # told to whoever asked, unless he has gone
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
