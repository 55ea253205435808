"""Queries that are text: vectors by a server, or by a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ppd.ann.minilm import MiniLM
from ppd.ann.space import Rows

from ..embedder import Embedder
from .requests import rows_of


class Embeddings(Protocol):
    async def embed(self, texts: Sequence[str]) -> Rows:
        """
        Raises:
            WorkerError: there is no answer, or none that makes sense.
        """
        ...


class ServedEmbeddings:
    """By a server of OpenAI's ``/v1/embeddings``."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def embed(self, texts: Sequence[str]) -> Rows:
        return np.asarray(rows_of(await self._embedder.embed(texts), "embedding"), np.float32)


class LocalEmbeddings:
    """In this process; one after the other, beside the searches."""

    def __init__(self, model: MiniLM) -> None:
        self._model = model
        self._one_at_a_time = asyncio.Lock()

    async def embed(self, texts: Sequence[str]) -> Rows:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._model.encode, texts)
