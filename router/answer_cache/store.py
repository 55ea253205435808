"""Where answers are kept: a collection of the pool, found by what their questions mean."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import orjson

from ppd.errors import WorkerError

from .answers import Answer
from .question import Question

_LOOKED_AT = 8  # nearest questions, of which some may be past their time
_WRITE_S = 10.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Attributes:
    score: cosine of both questions.
    """

    answer: Answer
    score: float
    age_s: float


class _Metadata(msgspec.Struct):
    scope: str
    at: float
    until: float
    answer: Answer


class _Hit(msgspec.Struct):
    score: float
    metadata: _Metadata


class _Result(msgspec.Struct):
    hits: list[_Hit]
    degraded: bool = False


class _Found(msgspec.Struct):
    results: list[_Result]


class AnswerStore:
    """
    Args:
        url: of the pool, without path.
    """

    def __init__(self, url: str, collection: str, client: aiohttp.ClientSession) -> None:
        self._url = f"{url.rstrip('/')}/v1/collections/{collection}"
        self._client = client

    async def find(
        self, question: Question, now_s: float, timeout_ms: float
    ) -> StoredResponse | None:
        """The answer to the nearest question that is near enough and not too old.

        Args:
            now_s: seconds since 1970.

        Raises:
            WorkerError: the pool did not answer in time, or nothing that makes sense.
        """
        body = {
            "text": question.text,
            "limit": _LOOKED_AT,
            "filter": {"scope": question.scope},
            "timeout_ms": timeout_ms,
        }
        status, raw = await self._ask("POST", "/search", body, timeout_ms / 1e3)
        if status == 404:  # nothing has been kept yet
            return None
        if status != 200:
            raise WorkerError(f"the answer cache: {self._url} answered {status} {raw[:200]!r}")
        try:
            found = msgspec.json.decode(raw, type=_Found)
        except msgspec.MsgspecError as error:
            raise WorkerError(f"the answer cache: {self._url}: {error}") from error
        (result,) = found.results or [_Result([])]
        if result.degraded and not result.hits:
            raise WorkerError(f"the answer cache found nothing in {timeout_ms:.0f} ms")
        for hit in result.hits:
            its = hit.metadata
            if its.scope == question.scope and its.until > now_s:
                near = hit.score >= question.threshold
                return StoredResponse(its.answer, hit.score, now_s - its.at) if near else None
        return None

    async def keep(self, question: Question, answer: Answer, now_s: float) -> None:
        """
        Raises:
            WorkerError: the pool does not take it.
        """
        kept = _Metadata(question.scope, now_s, now_s + question.ttl_s, answer)
        point = {"id": uuid.uuid4().hex, "text": question.text}
        body = {"points": [{**point, "metadata": msgspec.to_builtins(kept)}]}
        status, raw = await self._ask("POST", "/points", body, _WRITE_S)
        if status == 404:
            made = {"metric": "cosine", "indexed": ["scope", "until"]}
            status, raw = await self._ask("PUT", "", made, _WRITE_S)
            if status in (200, 201):
                status, raw = await self._ask("POST", "/points", body, _WRITE_S)
        _require(status, raw, self._url)

    async def forget_older(self, now_s: float) -> None:
        """
        Raises:
            WorkerError: the pool does not do it.
        """
        body = {"filter": {"until": {"lte": now_s}}}
        status, raw = await self._ask("POST", "/delete", body, _WRITE_S)
        if status != 404:
            _require(status, raw, self._url)

    async def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with self._client.request(
                method,
                self._url + path,
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise WorkerError(f"the answer cache was too late: over {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            told = error or type(error).__name__
            raise WorkerError(f"the answer cache: {self._url}: {told}") from error


def _require(status: int, raw: bytes, url: str) -> None:
    if status != 200:
        raise WorkerError(f"the answer cache: {url} answered {status} {raw[:200]!r}")
