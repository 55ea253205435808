"""What clients of the pool may send, and what they get: JSON, and a binary form for many vectors.

Binary search, little-endian, ``application/octet-stream``: ``PPDQ``, then uint32 vectors,
dimensions, limit, itopk (0: the default) and stage (0: prefill, 1: decode), float32 timeout_ms
(0: the default), then float32 vectors. The answer: ``PPDR``, uint32 vectors, limit; int64 keys,
-1 where there is none; float32 scores; uint8 degraded. ``POST .../payloads`` turns keys into rows.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ppd.ann.engine import MAX_ITOPK
from ppd.ann.schedule import Stage
from ppd.ann.space import Metric, Rows, Space
from ppd.errors import RequestError

MAX_VECTORS = 4096  # of one request
MAX_POINTS = 10_000
BINARY = "application/octet-stream"
_QUERY, _ANSWER = struct.Struct("<4sIIIIIf"), struct.Struct("<4sII")
_STAGES = (Stage.PREFILL, Stage.DECODE)


class SearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    itopk: int | None = None


class SearchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of vector, vectors, text, texts."""

    vector: list[float] | None = None
    vectors: list[list[float]] | None = None
    text: str | None = None
    texts: list[str] | None = None
    limit: int = 10
    filter: Any = None
    params: SearchParams = SearchParams()
    stage: Stage = Stage.PREFILL
    timeout_ms: float | None = None
    with_payload: bool = True


class Asked(msgspec.Struct, frozen=True):
    """A search request that makes sense by itself; vectors or texts are there."""

    vectors: Rows | None
    texts: list[str]
    limit: int
    itopk: int | None
    filter: Any
    stage: Stage
    timeout_ms: float | None
    with_payload: bool

    @property
    def count(self) -> int:
        return len(self.texts) if self.vectors is None else self.vectors.shape[0]


class CreateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    dimensions: None: those of the vectors that texts get here.
    indexed: fields of metadata that filters shall find fast.
    """

    dimensions: int | None = None
    metric: Metric = Metric.COSINE
    indexed: list[str] = []


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without a vector its text is embedded."""

    id: str
    vector: list[float] | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None


class UpsertBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    points: list[Point]


class DeleteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them."""

    ids: list[str] | None = None
    filter: Any = None


class PayloadsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


class FeedbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the router sees; without ``prefill_wait_p95_ms`` the pool's own measurement counts."""

    kv_link_use: float
    decode_stall: float
    prefill_wait_p95_ms: float | None = None


_T = TypeVar("_T")


def parse(body: bytes, kind: type[_T]) -> _T:
    """
    Raises:
        RequestError: it is no JSON, or not of that kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is wrong: {error}") from error


def parse_search(body: bytes, content_type: str) -> Asked:
    """
    Raises:
        RequestError: it makes no sense.
    """
    return _checked(_binary(body) if content_type == BINARY else _from_json(body))


def rows_of(vectors: list[list[float]], param: str) -> Rows:
    """
    Raises:
        RequestError: they are not of one length, or there is none.
    """
    if not vectors or not vectors[0]:
        raise RequestError(f"{param} is empty", param=param)
    if len({len(one) for one in vectors}) > 1:
        raise RequestError(f"{param} are not all of one dimension", param=param)
    return np.array(vectors, np.float32)


def require_time(timeout_ms: float | None) -> None:
    """Raises: RequestError."""
    if timeout_ms is not None and not 0 < timeout_ms <= 600_000:
        raise RequestError("timeout_ms must be above 0, and 600000 at most", param="timeout_ms")


def require_fit(rows: Rows, space: Space, param: str) -> None:
    """
    Raises:
        RequestError: vectors are of another dimension, not finite, or of no length where directions
            are compared.
    """
    require_dimensions(rows, space.dimensions, param)
    if space.metric is Metric.COSINE and (zero := np.flatnonzero(~rows.any(1))).size:
        raise RequestError(
            f"{param}: number {int(zero[0])} is all zeros, which has no cosine", param=param
        )


def require_dimensions(rows: Rows, dimensions: int, param: str) -> None:
    """
    Raises:
        RequestError: vectors are of another dimension, or not finite.
    """
    if rows.shape[1] != dimensions:
        raise RequestError(
            f"{param}: {rows.shape[1]} dimensions; the collection has {dimensions}", param=param
        )
    wrong = np.flatnonzero(~np.isfinite(rows).all(1))
    if wrong.size:
        raise RequestError(f"{param}: number {int(wrong[0])} is not finite", param=param)


def answer(keys: NDArray[np.int64], scores: Rows, degraded: NDArray[np.uint8]) -> bytes:
    """The binary form of results, (vectors, limit)."""
    head = _ANSWER.pack(b"PPDR", *keys.shape)
    return head + keys.tobytes() + scores.astype(np.float32).tobytes() + degraded.tobytes()


def _from_json(body: bytes) -> Asked:
    given = parse(body, SearchBody)
    forms = [given.vector, given.vectors, given.text, given.texts]
    if sum(form is not None for form in forms) != 1:
        raise RequestError("give one of vector, vectors, text, texts")
    vectors, texts = None, given.texts or []
    if given.vector is not None:
        vectors = rows_of([given.vector], "vector")
    elif given.vectors is not None:
        vectors = rows_of(given.vectors, "vectors")
    elif given.text is not None:
        texts = [given.text]
    return Asked(
        vectors=vectors,
        texts=texts,
        limit=given.limit,
        itopk=given.params.itopk,
        filter=given.filter,
        stage=given.stage,
        timeout_ms=given.timeout_ms,
        with_payload=given.with_payload,
    )


def _binary(body: bytes) -> Asked:
    if len(body) < _QUERY.size or body[:4] != b"PPDQ":
        raise RequestError("the body is no binary search")
    _, count, dimensions, limit, itopk, stage, timeout_ms = _QUERY.unpack_from(body)
    if len(body) != _QUERY.size + 4 * count * dimensions:
        raise RequestError(
            f"the body has {len(body)} bytes, {count} x {dimensions} vectors take "
            f"{_QUERY.size + 4 * count * dimensions}"
        )
    if stage >= len(_STAGES) or not count or not dimensions:
        raise RequestError("vectors, dimensions or stage are out of range")
    return Asked(
        vectors=np.frombuffer(body, "<f4", offset=_QUERY.size).reshape(count, dimensions),
        texts=[],
        limit=limit,
        itopk=itopk or None,
        filter=None,
        stage=_STAGES[stage],
        timeout_ms=timeout_ms or None,
        with_payload=False,
    )


def _checked(asked: Asked) -> Asked:
    if not 0 < asked.count <= MAX_VECTORS:
        raise RequestError(f"a request has 1 to {MAX_VECTORS} queries, this one {asked.count}")
    if not 1 <= asked.limit <= MAX_ITOPK:
        raise RequestError(f"limit must be 1 to {MAX_ITOPK}", param="limit")
    if asked.itopk is not None and not 1 <= asked.itopk <= MAX_ITOPK:
        raise RequestError(f"params.itopk must be 1 to {MAX_ITOPK}", param="params.itopk")
    if asked.itopk is not None and asked.limit > asked.itopk:
        raise RequestError(
            f"limit {asked.limit} is above params.itopk {asked.itopk}: a search finds at most "
            "what it keeps",
            param="limit",
        )
    require_time(asked.timeout_ms)
    return asked
