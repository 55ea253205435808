"""Texts to vectors, by a server of OpenAI's ``/v1/embeddings``, such as SGLang's."""

from __future__ import annotations

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError


class _Row(msgspec.Struct):
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


class Embedder:
    """
    Args:
        url: of the server, without path.
    """

    def __init__(self, url: str, model: str, client: aiohttp.ClientSession) -> None:
        self._url = f"{url.rstrip('/')}/v1/embeddings"
        self._model = model
        self._client = client

    async def embed(self, text: str) -> list[float]:
        """
        Raises:
            WorkerError: the server does not answer as it should.
        """
        body = orjson.dumps({"model": self._model, "input": text})
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.post(self._url, data=body, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            told = str(error) or type(error).__name__
            raise WorkerError(f"retrieval failed: {self._url}: {told}") from error
        if response.status != 200:
            raise WorkerError(f"retrieval failed: {self._url} answered {response.status}")
        try:
            (row,) = msgspec.json.decode(raw, type=_Answer).data
        except (msgspec.MsgspecError, ValueError) as error:
            raise WorkerError(f"retrieval failed: {self._url}: {error}") from error
        return row.embedding
