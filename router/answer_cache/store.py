"""The store of answers: a collection of the pool, searched by the text of questions."""

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

_MAX_HITS = 8  # nearest questions, of which some may have expired
_WRITE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored answer that was found for a question.

    Attributes:
        answer: the answer.
        score: cosine of the question and the stored one.
        age_s: age of the answer.
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


class _SearchAnswer(msgspec.Struct):
    results: list[_Result]


class AnswerStore:
    """Stores answers in a collection of the pool, which is made on first use.

    Args:
        url: of the pool, without a path.
        collection: its name.
        client: an HTTP session.
    """

    def __init__(self, url: str, collection: str, client: aiohttp.ClientSession) -> None:
        self._url = f"{url.rstrip('/')}/v1/collections/{collection}"
        self._client = client

    async def find(
        self, question: Question, now_s: float, timeout_ms: float
    ) -> StoredAnswer | None:
        """The answer to the nearest question that has not expired; None if it is not near enough.

        Args:
            question: the question; its ``threshold`` is the minimum cosine.
            now_s: seconds since 1970.
            timeout_ms: deadline of the search.

        Raises:
            WorkerError: the pool did not answer in time, or its answer is malformed.
        """
        body = {
            "text": question.text,
            "limit": _MAX_HITS,
            "filter": {"scope": question.scope},
            "timeout_ms": timeout_ms,
        }
        status, raw = await self._request("POST", "/search", body, timeout_ms / 1e3)
        if status == 404:  # no answer has been stored yet
            return None
        if status != 200:
            raise WorkerError(f"the answer cache: {self._url} answered {status} {raw[:200]!r}")
        try:
            answer = msgspec.json.decode(raw, type=_SearchAnswer)
        except msgspec.MsgspecError as error:
            raise WorkerError(f"the answer cache: {self._url}: {error}") from error
        (result,) = answer.results or [_Result([])]
        if result.degraded and not result.hits:
            raise WorkerError(f"the answer cache found nothing in {timeout_ms:.0f} ms")
        for hit in result.hits:
            stored = hit.metadata
            if stored.scope == question.scope and stored.until > now_s:
                if hit.score < question.threshold:
                    return None
                return StoredAnswer(stored.answer, hit.score, now_s - stored.at)
        return None

    async def put(self, question: Question, answer: Answer, now_s: float) -> None:
        """Store the answer to a question.

        Args:
            question: the question; its ``ttl_s`` is the lifetime of the answer.
            answer: the answer.
            now_s: seconds since 1970.

        Raises:
            WorkerError: the pool refused the answer, or did not respond.
        """
        metadata = _Metadata(question.scope, now_s, now_s + question.ttl_s, answer)
        point = {"id": uuid.uuid4().hex, "text": question.text}
        body = {"points": [{**point, "metadata": msgspec.to_builtins(metadata)}]}
        status, raw = await self._request("POST", "/points", body, _WRITE_TIMEOUT_S)
        if status == 404:
            collection = {"metric": "cosine", "indexed": ["scope", "until"]}
            status, raw = await self._request("PUT", "", collection, _WRITE_TIMEOUT_S)
            if status in (200, 201):
                status, raw = await self._request("POST", "/points", body, _WRITE_TIMEOUT_S)
        _require_ok(status, raw, self._url)

    async def delete_expired(self, now_s: float) -> None:
        """Delete the answers that have expired.

        Args:
            now_s: seconds since 1970.

        Raises:
            WorkerError: the pool refused the request, or did not respond.
        """
        body = {"filter": {"until": {"lte": now_s}}}
        status, raw = await self._request("POST", "/delete", body, _WRITE_TIMEOUT_S)
        if status != 404:
            _require_ok(status, raw, self._url)

    async def _request(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> tuple[int, bytes]:
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
            reason = error or type(error).__name__
            raise WorkerError(f"the answer cache: {self._url}: {reason}") from error


def _require_ok(status: int, raw: bytes, url: str) -> None:
    if status != 200:
        raise WorkerError(f"the answer cache: {url} answered {status} {raw[:200]!r}")
