"""Request bodies of the pool, in JSON and, for many vectors, in a binary form.

The binary form is little-endian with the type ``application/octet-stream``. A search has ``PPDQ``,
then uint32 vectors, dimensions, limit, itopk (0: the default) and stage (0: prefill, 1: decode),
float32 timeout_ms (0: the default), then float32 vectors. A response has ``PPDR``, uint32 vectors
and limit, int64 keys (-1: no hit), float32 scores, uint8 degraded. ``POST .../payloads`` returns
the rows of keys.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ppd.ann.schedule import Stage
from ppd.ann.searches import MAX_ITOPK
from ppd.ann.space import Metric, Rows, Space
from ppd.errors import RequestError

MAX_VECTORS = 4096  # of one request
MAX_POINTS = 10_000
BINARY = "application/octet-stream"
_QUERY, _RESULTS = struct.Struct("<4sIIIIIf"), struct.Struct("<4sII")
_STAGES = (Stage.PREFILL, Stage.DECODE)


class SearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the search algorithm.

    Attributes:
        itopk: candidates that a graph search keeps; None: the pool's default.
    """

    itopk: int | None = None


class SearchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON body of a search, with exactly one of vector, vectors, text and texts."""

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


class SearchRequest(msgspec.Struct, frozen=True):
    """A checked search request of either form.

    Attributes:
        vectors: of the queries, (n, dimensions); None: ``texts`` are to be embedded.
        texts: of the queries; [] with ``vectors``.
        limit: hits of each query.
        itopk: candidates that a graph search keeps; None: the pool's default.
        filter: that hits must pass, not parsed yet.
        stage: that waits for the search.
        timeout_ms: None: the pool's default.
        with_payload: hits include text and metadata.
    """

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
        """Number of queries."""
        return len(self.texts) if self.vectors is None else self.vectors.shape[0]


class CreateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that creates a collection.

    Attributes:
        dimensions: of the vectors; None: those of the pool's embedding model.
        metric: of the vectors' distance.
        indexed: fields of the metadata that get an index for filters.
    """

    dimensions: int | None = None
    metric: Metric = Metric.COSINE
    indexed: list[str] = []


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row to be written; without a vector its text is embedded."""

    id: str
    vector: list[float] | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None


class UpsertBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that writes rows."""

    points: list[Point]


class DeleteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that deletes rows, with exactly one of ids and filter."""

    ids: list[str] | None = None
    filter: Any = None


class PayloadsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for the payloads of keys."""

    keys: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


class SwapBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to replace a collection by one that was built offline.

    Attributes:
        folder: of the new collection, in the pool's data folder.
    """

    folder: str


class FeedbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router's measurements for the control loop.

    Attributes:
        kv_link_use: utilization of the KV links, 0 to 1.
        token_ms: time between two tokens of a stream; None if there was none.
        decode_wait_p95_ms: latency of decode searches; None: the pool's own measurement.
    """

    kv_link_use: float
    token_ms: float | None = None
    decode_wait_p95_ms: float | None = None


_T = TypeVar("_T")


def parse(body: bytes, kind: type[_T]) -> _T:
    """Decode a JSON body.

    Raises:
        RequestError: the body is no JSON, or not of type ``kind``.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is wrong: {error}") from error


def parse_search(body: bytes, content_type: str) -> SearchRequest:
    """Decode and check the body of a search, in the form of its content type.

    Raises:
        RequestError: the body is malformed, or a field is out of range.
    """
    return _checked(_from_binary(body) if content_type == BINARY else _from_json(body))


def rows_of(vectors: list[list[float]], param: str) -> Rows:
    """Return vectors as an array, (vectors, dimensions) float32.

    Args:
        vectors: one or more, of equal length.
        param: name of the request's field, for the error.

    Raises:
        RequestError: they are of different lengths, or there is none.
    """
    if not vectors or not vectors[0]:
        raise RequestError(f"{param} is empty", param=param)
    if len({len(vector) for vector in vectors}) > 1:
        raise RequestError(f"{param} are not all of one dimension", param=param)
    return np.array(vectors, np.float32)


def require_time(timeout_ms: float | None) -> None:
    """Check a timeout.

    Raises:
        RequestError: it is out of range.
    """
    if timeout_ms is not None and not 0 < timeout_ms <= 600_000:
        raise RequestError("timeout_ms must be above 0, and 600000 at most", param="timeout_ms")


def require_fit(rows: Rows, space: Space, param: str) -> None:
    """Check that vectors fit a space.

    Args:
        rows: the vectors, (n, dimensions).
        space: of the collection.
        param: name of the request's field, for the error.

    Raises:
        RequestError: vectors are of another dimension or not finite, or are zero in a space with
            cosine metric.
    """
    require_dimensions(rows, space.dimensions, param)
    if space.metric is Metric.COSINE and (zero := np.flatnonzero(~rows.any(1))).size:
        raise RequestError(
            f"{param}: number {int(zero[0])} is all zeros, which has no cosine", param=param
        )


def require_dimensions(rows: Rows, dimensions: int, param: str) -> None:
    """Check that vectors are finite and of the given dimension.

    Args:
        rows: the vectors, (n, dimensions).
        dimensions: that are required.
        param: name of the request's field, for the error.

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


def encode_results(keys: NDArray[np.int64], scores: Rows, degraded: NDArray[np.uint8]) -> bytes:
    """Return the binary form of results; keys and scores are (vectors, limit)."""
    head = _RESULTS.pack(b"PPDR", *keys.shape)
    return head + keys.tobytes() + scores.astype(np.float32).tobytes() + degraded.tobytes()


def _from_json(body: bytes) -> SearchRequest:
    fields = parse(body, SearchBody)
    forms = [fields.vector, fields.vectors, fields.text, fields.texts]
    if sum(form is not None for form in forms) != 1:
        raise RequestError("give one of vector, vectors, text, texts")
    vectors, texts = None, fields.texts or []
    if fields.vector is not None:
        vectors = rows_of([fields.vector], "vector")
    elif fields.vectors is not None:
        vectors = rows_of(fields.vectors, "vectors")
    elif fields.text is not None:
        texts = [fields.text]
    return SearchRequest(
        vectors=vectors,
        texts=texts,
        limit=fields.limit,
        itopk=fields.params.itopk,
        filter=fields.filter,
        stage=fields.stage,
        timeout_ms=fields.timeout_ms,
        with_payload=fields.with_payload,
    )


def _from_binary(body: bytes) -> SearchRequest:
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
    return SearchRequest(
        vectors=np.frombuffer(body, "<f4", offset=_QUERY.size).reshape(count, dimensions),
        texts=[],
        limit=limit,
        itopk=itopk or None,
        filter=None,
        stage=_STAGES[stage],
        timeout_ms=timeout_ms or None,
        with_payload=False,
    )


def _checked(search: SearchRequest) -> SearchRequest:
    if not 0 < search.count <= MAX_VECTORS:
        raise RequestError(f"a request has 1 to {MAX_VECTORS} queries, this one {search.count}")
    if not 1 <= search.limit <= MAX_ITOPK:
        raise RequestError(f"limit must be 1 to {MAX_ITOPK}", param="limit")
    if search.itopk is not None and not 1 <= search.itopk <= MAX_ITOPK:
        raise RequestError(f"params.itopk must be 1 to {MAX_ITOPK}", param="params.itopk")
    if search.itopk is not None and search.limit > search.itopk:
        raise RequestError(
            f"limit {search.limit} is above params.itopk {search.itopk}: a search finds at most "
            "what it keeps",
            param="limit",
        )
    require_time(search.timeout_ms)
    return search
