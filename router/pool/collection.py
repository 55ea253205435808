"""One collection: its index, its payloads, and the changes since the index was built.

``plan`` selects how to search. Only one writer adds or deletes at a time. Added rows enter the
graph hidden. After the commit they become visible, and the rows they replace hidden, in one step. A
rebuild works on a copy, which replaces the index in one step, in memory and on disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ppd.ann.growth import Growth
from ppd.ann.lanes import Target
from ppd.ann.neighbours import Finder
from ppd.ann.searches import MAX_ITOPK
from ppd.ann.snapshot import MAX_KNN, Precision, Shape, Snapshot, build
from ppd.ann.space import Rows, Space
from ppd.errors import IndexFileError, RequestError

from . import index_file
from .filters import Filter
from .payloads import Payload, Payloads

_MAX_FILTERS = 32  # cached results of filters
_MAX_SCANS = 3  # attempts at a filter during writes; then the writes wait for one
_SEEN_PER_ITOPK = 20  # rows that a graph search reads for each one it keeps
_MIN_CHANGED = 4096  # changed rows that justify a rebuild
_CANDIDATES = 2  # for each neighbour at a rebuild, at least, as by default at a build
ROWS_FILE = "rows.sqlite"


def index_path(folder: Path, generation: int) -> Path:
    """Return the path of a collection's index file."""
    return folder / f"index-{generation:06d}.ann"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to search a collection.

    Attributes:
        target: that is searched.
        itopk: candidates that a graph search keeps.
        among: nodes of a scan, (n,) int32; None: a graph search.
        filled: rows of the target, hidden ones included.
        findable: rows that the search may return.
    """

    target: Target
    itopk: int
    among: NDArray[np.int32] | None
    filled: int
    findable: int


class Collection:
    """The rows of one collection: search plans, writes and rebuilds. Its methods are thread-safe.

    Args:
        folder: of the collection; its last part is the name.
        warm: is called with every new target before it is searched.

    Raises:
        IndexFileError: ``folder`` holds no collection, or a damaged one.

    Attributes:
        exchanges: a count that is odd while all rows are exchanged by a swap, and even otherwise.
            What was found at another count may lack the payloads of its rows.
    """

    def __init__(self, folder: Path, warm: Callable[[Target], None]) -> None:
        self._warm = warm
        self.name = folder.name
        self._folder = folder
        if not (folder / ROWS_FILE).exists():
            raise IndexFileError(f"{folder}: there is no collection; ppd-pool build makes one")
        self.payloads = Payloads(folder / ROWS_FILE)
        self._writing = threading.Lock()
        self._committing = threading.Lock()  # held until committed rows are visible
        self._rebuilding = threading.Lock()
        self.exchanges = 0
        self.version = 0  # of the rows that filters are matched against
        self._rows: Target | Growth
        current = index_path(folder, self.payloads.generation())
        self._serve(self._with_added_rows(index_file.read(current)))
        for file in folder.glob("index-*"):  # left by a killed rebuild
            if file != current:
                file.unlink()

    @property
    def space(self) -> Space:
        """The space of the vectors."""
        return self.target.snapshot.space

    @property
    def target(self) -> Target:
        """The present target of searches without a filter."""
        rows = self._rows
        return rows.target if isinstance(rows, Growth) else rows

    @property
    def count(self) -> int:
        """Number of visible rows."""
        return self._living

    def outdated(self, share: float) -> bool:
        """Return whether enough rows have changed for a rebuild.

        Args:
            share: of the rows that the index was built from.
        """
        filled = self._filled()
        deleted = filled - self._living
        changed = filled - self._built + deleted
        return filled > deleted and changed >= max(_MIN_CHANGED, share * self._built)

    def plan(self, itopk: int, row_filter: Filter | None) -> Plan:
        """Return how to search.

        Rows that are deleted or do not pass the filter cost a graph search candidates. So the
        search keeps more of them, or scans all visible rows if that reads fewer.

        Args:
            itopk: candidates to keep if all rows were visible.
            row_filter: None: all rows pass. With a filter this method may read from disk.
        """
        target, filled = self._current()
        findable, among = self._living, None
        if row_filter is not None:
            target, among = self._filtered(row_filter)
            findable = among.size
        wider = itopk * filled / max(findable, 1)
        if (
            target.snapshot.has_graph
            and wider <= MAX_ITOPK
            and (among is None or findable > wider * _SEEN_PER_ITOPK)
        ):
            return Plan(target, int(wider), None, filled, findable)
        if among is None:
            among = _visible(target, filled)
        return Plan(target, itopk, among, filled, findable)

    def wider(self, plan: Plan) -> Plan:
        """Return the next plan after a graph search that returned too few rows.

        Most rows near its query were hidden. The next plan has the maximum width, or is a scan
        if that reads fewer rows or the width was not enough.
        """
        among = _visible(plan.target, plan.filled)
        if plan.itopk < MAX_ITOPK and among.size > MAX_ITOPK * _SEEN_PER_ITOPK:
            return replace(plan, itopk=MAX_ITOPK)
        return replace(plan, among=among)

    def payloads_of(self, target: Target, nodes: NDArray[np.int32]) -> list[Payload | None]:
        """Return the nodes' payloads; None for a row that has been deleted since the search.

        Args:
            target: that was searched.
            nodes: of the target, (n,) int32.
        """
        keys = target.snapshot.keys[nodes].tolist()
        found = self.payloads.fetch(set(keys))
        return [found.get(key) for key in keys]

    def upsert(self, payloads: Sequence[Payload], vectors: Rows) -> None:
        """Add rows, which replace rows with the same ids.

        Args:
            payloads: of the rows.
            vectors: of the rows, (n, dimensions) float32.

        Raises:
            RequestError: a vector does not fit the space. Nothing is changed then.
        """
        with self._writing:
            self.space.rows(vectors)  # raises before anything is written
            before = self.target
            rows = self._rows
            if isinstance(rows, Target):
                rows = self._rows = Growth(rows.snapshot, rows.hidden, self._warm)
            rows.have_room(len(payloads))
            if self.target is not before:
                with self._committing:
                    self._filters.clear()  # they refer to the old target
            keys = self.payloads.new_keys(len(payloads))
            first = rows.count
            rows.add(vectors, keys, hidden=True)
            with self._committing:
                old = self.payloads.upsert(keys, payloads, vectors)
                self.target.hidden[first : rows.count] = 0
                self._hide(old)

    def delete(self, what: Sequence[str] | Filter) -> int:
        """Delete rows, and return their number.

        Args:
            what: ids, or a filter that the rows pass.
        """
        with self._writing, self._committing:
            if isinstance(what, Filter):
                deleted = self.payloads.delete_matching(what)
            else:
                deleted = self.payloads.delete(what)
            self._hide(deleted)
        return len(deleted)

    def rebuild(self, threads: int, finder: Finder = Finder.FAISS) -> None:
        """Replace the index by a new one of the visible rows; searches continue meanwhile.

        Args:
            threads: of the build.
            finder: of each row's nearest neighbours.

        Raises:
            IndexFileError: the index cannot be written, or there is no row. The old one remains.
        """
        with self._rebuilding:
            with self._writing:
                snapshot = self.target.snapshot
                live = np.flatnonzero(self.target.hidden[: self._filled()] == 0)
                rows = snapshot.exact if snapshot.exact.shape[0] else snapshot.graph.codes
                encoded, keys = np.asarray(rows[live], np.float32), snapshot.keys[live]
            if not live.size:
                raise IndexFileError(f"{self.name}: no row is left to build an index of")
            degree = snapshot.graph.neighbours.shape[1]
            shape = Shape(degree, knn=min(max(Shape().knn, _CANDIDATES * degree), MAX_KNN))
            metric, vectors = snapshot.space.metric, snapshot.space.users(encoded)
            # Rows written meanwhile were checked against the old space; they must fit the new one.
            space = Space.fit(vectors, metric, 0, snapshot.space.length)
            # A collection that was created empty has no codes; it gets ppd-pool build's default.
            precision = snapshot.precision if snapshot.has_graph else Precision.INT8
            built = build(
                vectors,
                keys,
                metric,
                precision,
                shape,
                threads=threads,
                seed=0,
                space=space,
                finder=finder,
            )
            before = self.payloads.generation()
            new = index_path(self._folder, before + 1)
            index_file.write(built, new)
            with self._writing:
                try:
                    rows_and_count = self._with_added_rows(built)
                    self.payloads.adopt(before + 1, keys)
                except BaseException:
                    new.unlink(missing_ok=True)
                    raise
                with self._committing:
                    self._serve(rows_and_count)
                index_path(self._folder, before).unlink(
                    missing_ok=True
                )  # present mappings stay valid

    def swap(self, folder: Path) -> None:
        """Replace all rows and the index by those that ``ppd-pool build`` has made in a folder.

        Searches continue meanwhile. A killed process leaves the old rows or the new ones.

        Raises:
            RequestError: the new rows have other dimensions or another metric. The old ones remain.
            IndexFileError: the folder holds no collection or a damaged one, or the new index cannot
                be written. The old rows remain.
        """
        if not (folder / ROWS_FILE).exists():
            raise IndexFileError(f"{folder.name}: there is no collection; ppd-pool build makes one")
        with closing(Payloads(folder / ROWS_FILE)) as made:
            living, added = made.keys(), made.added()[0]
            snapshot = index_file.read(index_path(folder, made.generation()))
        if added.size:
            raise IndexFileError(f"{folder.name}: {added.size} of its rows are not in its index")
        with self._rebuilding, self._writing:
            here, there = self.space, snapshot.space
            if (here.dimensions, here.metric) != (there.dimensions, there.metric):
                raise RequestError(
                    f"{folder.name} has {there.dimensions} dimensions and metric {there.metric}; "
                    f"{self.name} has {here.dimensions} and {here.metric}",
                    status=409,
                    param="folder",
                )
            last = int(snapshot.keys[-1]) if snapshot.count else 0
            offset = int(self.payloads.new_keys(last)[0]) - 1 if last else 0
            before = self.payloads.generation()
            new = index_path(self._folder, before + 1)
            index_file.write(replace(snapshot, keys=snapshot.keys + offset), new)
            try:
                moved = index_file.read(new)
                hidden = (~np.isin(moved.keys, living + offset)).astype(np.uint8)
                target = Target(moved, hidden)
                self._warm(target)
                with self._committing:
                    source = folder / ROWS_FILE
                    self.payloads.replace_by(source, offset, before + 1, self._exchanging)
                    self._serve((target, moved.count))
            except BaseException:
                if self.payloads.generation() == before:
                    new.unlink(missing_ok=True)
                raise
            finally:
                self.exchanges += self.exchanges % 2
            index_path(self._folder, before).unlink(missing_ok=True)  # mappings stay valid

    def _exchanging(self) -> None:
        self.exchanges += 1

    def close(self) -> None:
        """Close the collection. No search may run any more.

        If many rows were added, a new index file with them is written first. Otherwise the next
        start adds them to the graph one by one.

        Raises:
            IndexFileError: the file cannot be written.
        """
        try:
            with self._rebuilding, self._writing:
                rows = self._rows
                many = isinstance(rows, Growth) and rows.count - self._built >= _MIN_CHANGED
                if many and self.target.snapshot.has_graph:
                    assert isinstance(rows, Growth)
                    self._replace_file(rows.snapshot())
        finally:
            self.payloads.close()

    def _replace_file(self, snapshot: Snapshot) -> None:
        before = self.payloads.generation()
        new = index_path(self._folder, before + 1)
        index_file.write(snapshot, new)
        try:
            self.payloads.adopt(before + 1, snapshot.keys)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        index_path(self._folder, before).unlink(missing_ok=True)

    def _with_added_rows(self, snapshot: Snapshot) -> tuple[Target | Growth, int]:
        """Return an index with the rows added since, and the number of rows without these."""
        living = self.payloads.keys()
        hidden = (~np.isin(snapshot.keys, living)).astype(np.uint8)
        added, vectors = self.payloads.added()
        later = ~np.isin(added, snapshot.keys)
        if vectors is None or not later.any():
            target = Target(snapshot, hidden)
            self._warm(target)
            return target, snapshot.count
        growth = Growth(snapshot, hidden, self._warm)
        growth.add(vectors[later], added[later])
        return growth, snapshot.count

    def _serve(self, rows_and_count: tuple[Target | Growth, int]) -> None:
        self._rows, self._built = rows_and_count
        self._filters: OrderedDict[Filter, tuple[int, Target, NDArray[np.int32]]] = OrderedDict()
        self._changed()

    def _changed(self) -> None:
        target, filled = self._current()
        self._living = filled - int(target.hidden[:filled].sum())
        self.version += 1

    def _current(self) -> tuple[Target, int]:
        """Return the present target, and the number of its rows, hidden ones included."""
        rows = self._rows
        if isinstance(rows, Growth):
            count = rows.count  # read first: the target may be replaced by a larger one
            return rows.target, count
        return rows, rows.snapshot.count

    def _filled(self) -> int:
        return self._current()[1]

    def _hide(self, keys: Sequence[int]) -> None:
        nodes = self._nodes(np.array(sorted(keys), np.int64))
        self.target.hidden[nodes] = 1
        self._changed()

    def _nodes(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the nodes of the keys that have one. Keys ascend with nodes."""
        target, filled = self._current()
        known = target.snapshot.keys[:filled]
        at = np.searchsorted(known, keys)
        found = (at < known.size) & (known[np.minimum(at, known.size - 1)] == keys)
        return np.asarray(at[found], np.int32)

    def _filtered(self, row_filter: Filter) -> tuple[Target, NDArray[np.int32]]:
        """Return the target and the nodes that pass a filter, cached until the next change."""
        cached = self._filters.get(row_filter)
        if cached is not None and cached[0] == self.version:
            return cached[1], cached[2]
        for _ in range(_MAX_SCANS):
            with self._committing:
                version = self.version
            keys = self.payloads.matching(row_filter)
            with self._committing:
                if self.version == version:
                    return self._match(row_filter, keys)
        with self._committing:
            return self._match(row_filter, self.payloads.matching(row_filter))

    def _match(
        self, row_filter: Filter, keys: NDArray[np.int64]
    ) -> tuple[Target, NDArray[np.int32]]:
        nodes = self._nodes(keys)
        target = self.target
        hidden = np.ones_like(target.hidden)
        hidden[nodes] = target.hidden[nodes]
        filtered = Target(target.snapshot, hidden)
        among = nodes[hidden[nodes] == 0]
        self._filters[row_filter] = self.version, filtered, among
        while len(self._filters) > _MAX_FILTERS:
            self._filters.popitem(last=False)
        return filtered, among


def _visible(target: Target, filled: int) -> NDArray[np.int32]:
    return np.flatnonzero(target.hidden[:filled] == 0).astype(np.int32)
