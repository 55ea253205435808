"""Embedding of texts, by a server or by a model in this process."""

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

_BATCH = 16  # texts of one request that are encoded together
_MAX_IN_A_ROW = 8  # batches of prefill searches, while decode searches wait
_RETRY_S = 60.0  # pause before another attempt to load a model


class Embeddings(Protocol):
    """A source of vectors for texts."""

    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        """Return a vector for each text, (texts, dimensions) float32.

        Args:
            texts: one or more.
            stage: of the search that waits for the vectors.

        Raises:
            WorkerError: the server does not respond, or not with these vectors.
        """
        ...


class ServedEmbeddings:
    """Vectors from a server of OpenAI's ``/v1/embeddings``."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        """Return the server's vectors; the stage has no effect."""
        return np.asarray(rows_of(await self._embedder.embed(texts), "embedding"), np.float32)


class Encoder(Protocol):
    """A model that turns texts into vectors."""

    def encode(self, texts: Sequence[str]) -> Rows:
        """Return a vector for each text, (texts, dimensions) float32."""
        ...


class OnFirstText:
    """A model that is loaded for the first text; not thread-safe.

    Args:
        load: loads the model.
    """

    def __init__(self, load: Callable[[], Encoder]) -> None:
        self._load = load
        self._model: Encoder | None = None
        self._failed: tuple[float, PpdError] | None = None

    def encode(self, texts: Sequence[str]) -> Rows:
        """Return a vector for each text; the first call loads the model.

        Raises:
            PpdError: the model cannot be loaded. Further calls raise it too, for a minute.
        """
        if self._model is None:
            if self._failed is not None and time.monotonic() < self._failed[0]:
                raise self._failed[1].with_traceback(None)
            try:
                self._model = self._load()
            except PpdError as error:
                self._failed = time.monotonic() + _RETRY_S, error
                raise
        return self._model.encode(texts)


class LocalEmbeddings:
    """Vectors from a model in this process.

    Requests are encoded one batch at a time. Those of prefill searches precede those of decode
    searches, but for every ninth batch.

    Args:
        model: that encodes the texts.
    """

    def __init__(self, model: Encoder) -> None:
        self._model = model
        self._busy = False
        self._waiting: dict[Stage, deque[asyncio.Future[None]]] = {
            stage: deque() for stage in Stage
        }
        self._in_a_row = 0

    async def embed(self, texts: Sequence[str], stage: Stage) -> Rows:
        """Return the model's vectors."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            await self._acquire(stage)
            batch = texts[start : start + _BATCH]
            encoding = asyncio.ensure_future(asyncio.to_thread(self._model.encode, batch))
            encoding.add_done_callback(self._end_batch)
            parts.append(await asyncio.shield(encoding))  # a thread cannot be stopped
        return np.concatenate(parts)

    async def _acquire(self, stage: Stage) -> None:
        """Wait for the model. It is free when its batch has ended, even if that was cancelled."""
        if self._busy:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[stage].append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # it got the model just now
                    self._release()
                raise
        self._busy = True

    def _end_batch(self, encoding: asyncio.Future[Rows]) -> None:
        if not encoding.cancelled():
            encoding.exception()  # raised by embed(), unless that was cancelled
        self._release()

    def _release(self) -> None:
        """Give the model to the oldest waiter, of prefill searches first."""
        first = Stage.DECODE if self._in_a_row >= _MAX_IN_A_ROW else Stage.PREFILL
        for stage in sorted(Stage, key=lambda stage: stage is not first):
            while self._waiting[stage]:
                waiter = self._waiting[stage].popleft()
                if not waiter.cancelled():
                    self._in_a_row = self._in_a_row + 1 if stage is Stage.PREFILL else 0
                    waiter.set_result(None)
                    return
        self._busy = False
