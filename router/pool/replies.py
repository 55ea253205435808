"""What the pool answers: hits out of what the engine found, collections as clients see them."""

from __future__ import annotations

import asyncio
from itertools import islice

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from ppd.ann.engine import Ending, Found
from ppd.ann.space import Rows

from .collection import Collection
from .payloads import Payload
from .requests import BINARY, answer


def as_json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def shown(collection: Collection) -> dict[str, object]:
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
    keys = np.stack([_keys(one) for one in found])
    late = np.array([one.ending is Ending.DEADLINE for one in found], np.uint8)
    return web.Response(
        body=answer(keys, _scores(vectors, found, limit), late), content_type=BINARY
    )


async def results(
    collection: Collection, vectors: Rows, found: list[Found], limit: int, with_payload: bool
) -> list[dict[str, object]]:
    """All of one target; rows deleted meanwhile are left out."""
    nodes = np.concatenate([one.nodes[one.nodes >= 0] for one in found])
    target = found[0].search.target
    rest = iter(await asyncio.to_thread(collection.payloads_of, target, nodes))
    told: list[dict[str, object]] = []
    for one, row in zip(found, _scores(vectors, found, limit).tolist(), strict=True):
        rows = list(islice(rest, int((one.nodes >= 0).sum())))
        hits = [
            _hit(payload, row[i], with_payload)
            for i, payload in enumerate(rows)
            if payload is not None
        ]
        told.append({"hits": hits, "degraded": one.ending is Ending.DEADLINE})
    return told


def nothing_yet() -> dict[str, object]:
    """Of a search whose time was over before it began."""
    return {"hits": [], "degraded": True}


def payload_of(one: Payload) -> dict[str, object]:
    return {"text": one.text, "metadata": one.metadata}


def _hit(payload: Payload, score: float, with_payload: bool) -> dict[str, object]:
    hit: dict[str, object] = {"id": payload.id, "score": score}
    return hit | payload_of(payload) if with_payload else hit


def _scores(vectors: Rows, found: list[Found], limit: int) -> Rows:
    near = np.full((len(found), limit), np.inf, np.float32)
    for i, one in enumerate(found):
        near[i, : one.near.size] = one.near
    return found[0].search.target.snapshot.space.scores(vectors, near)


def _keys(found: Found) -> NDArray[np.int64]:
    keys = found.search.target.snapshot.keys[found.nodes]
    return np.where(found.nodes >= 0, keys, -1)
