"""One search and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from .lanes import Target
from .schedule import Ticket
from .space import Rows

MAX_ITOPK = 1024
SCANNED_PER_EXPANSION = 24  # rows; scanning them takes about as long as one expansion
_EXPANSIONS_PER_ITOPK = 1.1  # a search ends when about so many nodes have been expanded


class Ending(StrEnum):
    """How a search ended."""

    COMPLETE = "complete"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(slots=True, eq=False, kw_only=True)
class Search(Ticket):
    """One search, as the scheduler and the engine track it.

    Attributes:
        target: the snapshot to search.
        query: (1, width), in the coordinates of the snapshot's space.
        itopk: number of nodes that the search keeps; at least ``limit``.
        limit: number of nodes to find.
        among: (m,) nodes to scan completely, instead of following the graph; None to follow it.
            The nearest ones by their codes, some more than ``limit``, are then measured again.
        place: the lane of the search; -1 before it has begun, and after its end. A scan has no
            lane; its place is 0.
        scanned: nodes of ``among`` that have been scanned.
        near: squared distances of a scan's nearest nodes.
        nodes: these nodes.
        filled: number of these nodes so far.
    """

    target: Target
    query: Rows
    itopk: int
    limit: int
    among: NDArray[np.int32] | None = None
    place: int = field(default=-1, init=False)
    scanned: int = field(default=0, init=False)
    near: NDArray[np.float32] = field(init=False)
    nodes: NDArray[np.int32] = field(init=False)
    filled: int = field(default=0, init=False)


def steps_of(itopk: int, among: NDArray[np.int32] | None = None) -> float:
    """Estimate the number of expansions that a search takes."""
    if among is not None:
        return among.size / SCANNED_PER_EXPANSION
    return itopk * _EXPANSIONS_PER_ITOPK


@dataclass(slots=True)
class Found:
    """The result of a search that has ended.

    Attributes:
        search: the search.
        near: (limit,) squared distances; infinity where there are fewer.
        nodes: (limit,) ids in the graph; -1 where there are fewer.
        ending: how the search ended.
        error: why the search could not begin, if it failed.
    """

    search: Search
    near: NDArray[np.float32]
    nodes: NDArray[np.int32]
    ending: Ending
    error: str = ""


def empty_result(limit: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The result of a search that found nothing: its distances and its nodes."""
    return np.full(limit, np.inf, np.float32), np.full(limit, -1, np.int32)
