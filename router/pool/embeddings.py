"""Texts to vectors, by a server of OpenAI's ``/v1/embeddings``, such as SGLang's."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import msgspec
import numpy as np

from ppd.ann.space import Rows
from ppd.errors import WorkerError

from .requests import rows_of


class _Row(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


class Embeddings:
    """
    Args:
        url: of the server, without path.
    """

    def __init__(
        self, url: str, model: str, timeout_s: float, session: aiohttp.ClientSession
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/embeddings"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = session

    async def embed(self, texts: Sequence[str]) -> Rows:
        """
        Raises:
            WorkerError: the server does not answer as it should.
        """
        body = {"model": self._model, "input": list(texts)}
        try:
            async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
                if response.status != 200:
                    raise WorkerError(f"{self._url} answered {response.status}")
                given = msgspec.json.decode(await response.read(), type=_Answer)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise WorkerError(f"{self._url}: {error or type(error).__name__}") from error
        if [one.index for one in sorted(given.data, key=lambda one: one.index)] != [
            *range(len(texts))
        ]:
            raise WorkerError(f"{self._url} gave {len(given.data)} vectors for {len(texts)} texts")
        ordered = sorted(given.data, key=lambda one: one.index)
        return np.asarray(rows_of([one.embedding for one in ordered], "embedding"), np.float32)
