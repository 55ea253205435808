"""Response bodies of the pool: hits from the engine's results, descriptions of collections."""

from __future__ import annotations

import asyncio
from itertools import islice

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from ppd.ann.searches import Ending, Found
from ppd.ann.space import Rows

from .collection import Collection
from .payloads import Payload
from .requests import BINARY, encode_results


def as_json(value: object, status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def describe(collection: Collection) -> dict[str, object]:
    """Return a collection's description for clients."""
    snapshot = collection.target.snapshot
    return {
        "name": collection.name,
        "rows": collection.count,
        "dimensions": snapshot.space.dimensions,
        "metric": snapshot.space.metric,
        "precision": snapshot.precision,
        "degree": snapshot.graph.neighbours.shape[1],
    }


def as_binary(vectors: Rows, found: list[Found], limit: int) -> web.Response:
    """Return a response in binary form.

    Args:
        vectors: of the queries, (n, dimensions).
        found: a result for each query.
        limit: hits of each query.
    """
    keys = np.stack([_keys(result) for result in found])
    late = np.array([result.ending is Ending.DEADLINE for result in found], np.uint8)
    return web.Response(
        body=encode_results(keys, _scores(vectors, found, limit), late), content_type=BINARY
    )


async def results(
    collection: Collection, vectors: Rows, found: list[Found], limit: int, with_payload: bool
) -> list[dict[str, object]]:
    """Return the JSON form of each query's result, without rows deleted since.

    Args:
        collection: that was searched.
        vectors: of the queries, (n, dimensions).
        found: a result for each query, all of one target.
        limit: hits of each query.
        with_payload: hits include text and metadata.
    """
    nodes = np.concatenate([result.nodes[result.nodes >= 0] for result in found])
    target = found[0].search.target
    payloads = iter(await asyncio.to_thread(collection.payloads_of, target, nodes))
    bodies: list[dict[str, object]] = []
    for result, scores in zip(found, _scores(vectors, found, limit).tolist(), strict=True):
        own = list(islice(payloads, int((result.nodes >= 0).sum())))
        hits = [
            _hit(payload, scores[i], with_payload)
            for i, payload in enumerate(own)
            if payload is not None
        ]
        bodies.append({"hits": hits, "degraded": result.ending is Ending.DEADLINE})
    return bodies


def empty_result() -> dict[str, object]:
    """Return the result of a query whose deadline passed before it began."""
    return {"hits": [], "degraded": True}


def payload_fields(payload: Payload) -> dict[str, object]:
    """Return text and metadata of a row."""
    return {"text": payload.text, "metadata": payload.metadata}


def _hit(payload: Payload, score: float, with_payload: bool) -> dict[str, object]:
    hit: dict[str, object] = {"id": payload.id, "score": score}
    return hit | payload_fields(payload) if with_payload else hit


def _scores(vectors: Rows, found: list[Found], limit: int) -> Rows:
    near = np.full((len(found), limit), np.inf, np.float32)
    for i, result in enumerate(found):
        near[i, : result.near.size] = result.near
    return found[0].search.target.snapshot.space.scores(vectors, near)


def _keys(found: Found) -> NDArray[np.int64]:
    keys = found.search.target.snapshot.keys[found.nodes]
    return np.where(found.nodes >= 0, keys, -1)
