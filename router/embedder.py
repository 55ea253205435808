"""Embedding of texts by a server of OpenAI's ``/v1/embeddings``, such as SGLang's."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError


class _Row(msgspec.Struct):
    index: int
    embedding: list[float]


class _Response(msgspec.Struct):
    data: list[_Row]


class Embedder:
    """A client of one embedding server.

    Args:
        url: of the server, without path.
        model: that requests name.
        client: for the requests.
        timeout_s: limit on a response; None: the client's own.
    """

    def __init__(
        self, url: str, model: str, client: aiohttp.ClientSession, timeout_s: float | None = None
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/embeddings"
        self._model = model
        self._client = client
        self._timeout_s = timeout_s

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text, in order.

        Raises:
            WorkerError: the server does not respond in time, or not with these vectors.
        """
        body = orjson.dumps({"model": self._model, "input": list(texts)})
        headers = {"Content-Type": "application/json"}
        default = self._client.timeout if self._timeout_s is None else None
        timeout = default or aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with self._client.post(
                self._url, data=body, headers=headers, timeout=timeout
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerError(f"{self._url}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise WorkerError(f"{self._url} answered {response.status}")
        try:
            rows = msgspec.json.decode(raw, type=_Response).data
        except msgspec.MsgspecError as error:
            raise WorkerError(f"{self._url}: {error}") from error
        rows.sort(key=lambda row: row.index)
        if [row.index for row in rows] != list(range(len(texts))):
            raise WorkerError(f"{self._url} gave {len(rows)} vectors for {len(texts)} texts")
        return [row.embedding for row in rows]
