"""A snapshot that takes in more rows while it is searched.

Rows go into room left at the end of every array. A row is written whole before any edge leads to
it, and an edge is one aligned word, so a search that runs meanwhile sees the graph with or without
it, never half. Where there is no graph there are no edges.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import batch
from .edges import held, link
from .lanes import Target
from .snapshot import Snapshot, encode
from .space import Rows

_ROOM = 1.25  # times what is there
_MIN_ROOM = 1024
_CANDIDATES = 64  # that a new row's neighbours are chosen from
_NO_KEY = np.iinfo(np.int64).max  # of room: keys stay in ascending order


class Growth:
    """
    Args:
        hidden: (n,) uint8, of the snapshot's rows.
        warm: gets what is to be searched from now on, before it is.

    Attributes:
        target: what to search; another one after room was made.
        count: rows that are there.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        hidden: NDArray[np.uint8],
        warm: Callable[[Target], None] = lambda target: None,
    ) -> None:
        self._warm = warm
        self.count = snapshot.count
        self.target = Target(snapshot, hidden)
        self._held = held(snapshot.graph.neighbours, snapshot.graph.seed_ids)
        self._make_room(self.count + 1)

    def have_room(self, rows: int) -> None:
        """For so many more."""
        if self.count + rows > self.target.hidden.shape[0]:
            self._make_room(self.count + rows)

    def add(self, rows: Rows, keys: NDArray[np.int64], *, hidden: bool = False) -> None:
        """
        Args:
            rows: (n, dimensions), as users know them.
            keys: larger than any before.
            hidden: they are not to be found yet.

        Raises:
            RequestError: a row is too long for its ``ip`` space.
        """
        moved = self.target.snapshot.space.rows(rows)
        self.have_room(rows.shape[0])
        for i in range(rows.shape[0]):
            self._add(rows[i : i + 1], moved[i], int(keys[i]), hidden)

    def snapshot(self) -> Snapshot:
        """What there is now, without room for more."""
        whole, count = self.target.snapshot, self.count
        graph = whole.graph._replace(
            codes=whole.graph.codes[:count], neighbours=whole.graph.neighbours[:count]
        )
        exact = whole.exact[:count] if whole.exact.shape[0] else whole.exact
        return replace(whole, graph=graph, exact=exact, keys=whole.keys[:count], written=array("i"))

    def _add(self, row: Rows, moved: Rows, key: int, hidden: bool) -> None:
        snapshot, node = self.target.snapshot, self.count
        near = self._nearest(row)
        snapshot.graph.codes[node] = encode(moved, snapshot.precision, snapshot.scale)[0]
        if snapshot.exact.shape[0]:
            snapshot.exact[node] = moved
        snapshot.keys[node] = key
        self.target.hidden[node] = hidden
        snapshot.written.append(node)
        link(snapshot.graph.codes, snapshot.graph.neighbours, self._held, node, near)
        to = snapshot.graph.neighbours[node]
        snapshot.written.extend([node, *to[to >= 0].tolist()])
        self.count += 1

    def _nearest(self, row: Rows) -> NDArray[np.int32]:
        if not self._everything.snapshot.has_graph:
            return np.empty(0, np.int32)
        _, found = batch.search(self._everything, row, _CANDIDATES, _CANDIDATES, lanes=1)
        nearest: NDArray[np.int32] = found[0][found[0] >= 0]
        return nearest

    def _make_room(self, rows: int) -> None:
        """Arrays with room for ``rows`` and some more. Who searches the old ones goes on there."""
        room = int(rows * _ROOM) + _MIN_ROOM
        old = self.target.snapshot
        graph = old.graph._replace(
            codes=_longer(old.graph.codes, self.count, room),
            neighbours=_longer(old.graph.neighbours, self.count, room),
        )
        exact = _longer(old.exact, self.count, room) if old.exact.shape[0] else old.exact
        keys = _longer(old.keys, self.count, room)
        keys[self.count :] = _NO_KEY
        snapshot = replace(old, graph=graph, exact=exact, keys=keys, written=array("i"))
        self._held = _longer(self._held, self.count, room)
        hidden = _longer(self.target.hidden, self.count, room)
        target = Target(snapshot, hidden)
        self._warm(target)
        self.target = target
        self._everything = Target(snapshot, np.zeros(room, np.uint8))


def _longer(array: NDArray[Any], filled: int, room: int) -> NDArray[Any]:
    longer = np.zeros((room, *array.shape[1:]), array.dtype)
    longer[:filled] = array[:filled]
    return longer
