"""A snapshot to which rows are added while it is searched.

Every array has spare room at its end, where rows are added. A row is written completely before any
edge leads to it, and an edge is one aligned word. So a concurrent search reads the graph with the
row or without it, never a part of it. Where there is no graph there are no edges.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import batch
from .edges import link, mark_tree
from .lanes import Target
from .snapshot import Snapshot, encode
from .space import Rows

_ROOM = 1.25  # new capacity, as a multiple of the rows
_MIN_ROOM = 1024  # spare rows
_CANDIDATES = 64  # from which a new row's neighbours are chosen
_NO_KEY = np.iinfo(np.int64).max  # of spare rows: keys stay in ascending order


class Growth:
    """A target to which rows can be added.

    Args:
        snapshot: the snapshot to begin with.
        hidden: (n,) uint8, of the snapshot's rows; 1 for a row that must not be found.
        warm: called with a new target before it is published.

    Attributes:
        target: the target to search; it is replaced when the arrays are enlarged.
        count: number of rows.
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
        self._tree_marks = mark_tree(snapshot.graph.neighbours, snapshot.graph.seed_ids)
        self._make_room(self.count + 1)

    def have_room(self, rows: int) -> None:
        """Make room for so many more rows, if there is not enough."""
        if self.count + rows > self.target.hidden.shape[0]:
            self._make_room(self.count + rows)

    def add(self, rows: Rows, keys: NDArray[np.int64], *, hidden: bool = False) -> None:
        """Add rows.

        Args:
            rows: (n, dimensions), in the users' space.
            keys: (n,) keys, larger than any before.
            hidden: whether the rows must not be found yet.

        Raises:
            RequestError: a row is too long for its ``ip`` space.
        """
        moved = self.target.snapshot.space.rows(rows)
        self.have_room(rows.shape[0])
        for i in range(rows.shape[0]):
            self._add(rows[i : i + 1], moved[i], int(keys[i]), hidden)

    def snapshot(self) -> Snapshot:
        """The current rows as a snapshot without spare room."""
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
        link(snapshot.graph.codes, snapshot.graph.neighbours, self._tree_marks, node, near)
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
        """Copy to arrays with room for ``rows`` and more; running searches keep the old arrays."""
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
        self._tree_marks = _longer(self._tree_marks, self.count, room)
        hidden = _longer(self.target.hidden, self.count, room)
        target = Target(snapshot, hidden)
        self._warm(target)
        self.target = target
        self._everything = Target(snapshot, np.zeros(room, np.uint8))


def _longer(array: NDArray[Any], filled: int, room: int) -> NDArray[Any]:
    longer = np.zeros((room, *array.shape[1:]), array.dtype)
    longer[:filled] = array[:filled]
    return longer
