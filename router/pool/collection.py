"""One collection: its index file, its payloads, and what became of both since they were read.

Searches ask ``plan`` what to go through. One writer at a time adds and deletes: what is added
enters the graph hidden, is committed, and comes in the old one's place in one step. A rebuild works
on a copy and takes the old one's place in one step, too, here and on the disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ppd.ann.engine import MAX_ITOPK
from ppd.ann.growth import Growth
from ppd.ann.lanes import Target
from ppd.ann.neighbours import Finder
from ppd.ann.snapshot import Precision, Shape, Snapshot, build
from ppd.ann.space import Rows, Space
from ppd.errors import IndexFileError

from . import index_file
from .filters import Filter
from .payloads import Payload, Payloads

_FILTERS_KEPT = 32
_UNDISTURBED = 3  # scans for a filter that a write may disturb; then writes wait for one
_SEEN_PER_ITOPK = 20  # rows that a search looks at for each it keeps
_MIN_CHANGED = 4096  # rows, for an index to be made anew because of them
ROWS_FILE = "rows.sqlite"


def index_path(folder: Path, generation: int) -> Path:
    return folder / f"index-{generation:06d}.ann"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to search.

    Attributes:
        among: nodes to look at, all of them, where few pass the filter.
        filled: rows of the target that are there, found or not.
        findable: those that may be found.
    """

    target: Target
    itopk: int
    among: NDArray[np.int32] | None
    filled: int
    findable: int


class Collection:
    """
    Args:
        warm: gets what is to be searched from now on, before it is.

    Raises:
        IndexFileError: there is none in ``folder``, or it is damaged.
    """

    def __init__(self, folder: Path, warm: Callable[[Target], None]) -> None:
        self._warm = warm
        self.name = folder.name
        self._folder = folder
        if not (folder / ROWS_FILE).exists():
            raise IndexFileError(f"{folder}: there is no collection; ppd-pool build makes one")
        self.payloads = Payloads(folder / ROWS_FILE)
        self._writing = threading.Lock()
        self._turning = threading.Lock()  # held while what is committed becomes what is found
        self._rebuilding = threading.Lock()
        self.version = 0  # of what filters were matched against
        self._rows: Target | Growth
        current = index_path(folder, self.payloads.generation())
        self._serve(self._grown(index_file.read(current)))
        for left in folder.glob("index-*"):  # by a rebuild that was killed
            if left != current:
                left.unlink()

    @property
    def space(self) -> Space:
        return self.target.snapshot.space

    @property
    def target(self) -> Target:
        rows = self._rows
        return rows.target if isinstance(rows, Growth) else rows

    @property
    def count(self) -> int:
        """Rows that can be found."""
        return self._living

    def outdated(self, share: float) -> bool:
        """Whether more has changed than ``share`` of what the index was built of."""
        filled = self._filled()
        gone = filled - self._living
        changed = filled - self._built + gone
        return filled > gone and changed >= max(_MIN_CHANGED, share * self._built)

    def plan(self, itopk: int, wanted: Filter | None) -> Plan:
        """What a filter leaves out, or was deleted, is made up for by searching wider, or row by
        row: what is less.

        With a filter it may read from the disk.
        """
        target, filled = self._there()
        findable, among = self._living, None
        if wanted is not None:
            target, among = self._filtered(wanted)
            findable = among.size
        wider = itopk * filled / max(findable, 1)
        if (
            target.snapshot.has_graph
            and wider <= MAX_ITOPK
            and (among is None or findable > wider * _SEEN_PER_ITOPK)
        ):
            return Plan(target, int(wider), None, filled, findable)
        if among is None:
            among = _shown(target, filled)
        return Plan(target, itopk, among, filled, findable)

    def wider(self, plan: Plan) -> Plan:
        """For a search along the graph that found less than there is: where it looked, most must
        not be found. As wide as can be; if that is no less work, or was not enough, row by row.
        """
        among = _shown(plan.target, plan.filled)
        if plan.itopk < MAX_ITOPK and among.size > MAX_ITOPK * _SEEN_PER_ITOPK:
            return replace(plan, itopk=MAX_ITOPK)
        return replace(plan, among=among)

    def payloads_of(self, target: Target, nodes: NDArray[np.int32]) -> list[Payload | None]:
        """None: deleted meanwhile."""
        keys = target.snapshot.keys[nodes].tolist()
        found = self.payloads.fetch(set(keys))
        return [found.get(key) for key in keys]

    def upsert(self, payloads: Sequence[Payload], vectors: Rows) -> None:
        """
        Raises:
            RequestError: a vector does not fit the space; then nothing was changed.
        """
        with self._writing:
            self.space.rows(vectors)  # before anything is written
            before = self.target
            rows = self._rows
            if isinstance(rows, Target):
                rows = self._rows = Growth(rows.snapshot, rows.hidden, self._warm)
            rows.have_room(len(payloads))
            if self.target is not before:
                with self._turning:
                    self._filters.clear()  # they hold what is not searched any more
            keys = self.payloads.new_keys(len(payloads))
            first = rows.count
            rows.add(vectors, keys, hidden=True)
            with self._turning:
                old = self.payloads.upsert(keys, payloads, vectors)
                self.target.hidden[first : rows.count] = 0
                self._hide(old)

    def delete(self, what: Sequence[str] | Filter) -> int:
        """By ids, or all that a filter lets through: how many were there."""
        with self._writing, self._turning:
            if isinstance(what, Filter):
                gone = self.payloads.delete_matching(what)
            else:
                gone = self.payloads.delete(what)
            self._hide(gone)
        return len(gone)

    def rebuild(self, threads: int, finder: Finder = Finder.FAISS) -> None:
        """A new index of the rows that live, in place of the old one; searches go on meanwhile.

        Raises:
            IndexFileError: it cannot be written, or nothing lives; the old one still serves.
        """
        with self._rebuilding:
            with self._writing:
                snapshot = self.target.snapshot
                live = np.flatnonzero(self.target.hidden[: self._filled()] == 0)
                rows = snapshot.exact if snapshot.exact.shape[0] else snapshot.graph.codes
                moved, keys = np.asarray(rows[live], np.float32), snapshot.keys[live]
            if not live.size:
                raise IndexFileError(f"{self.name}: no row is left to build an index of")
            shape = replace(Shape(), degree=snapshot.graph.neighbours.shape[1])
            metric, given = snapshot.space.metric, snapshot.space.users(moved)
            # What is written meanwhile was let in by the old space, and must fit the new one.
            space = Space.fit(given, metric, 0, snapshot.space.length)
            # What was made empty, and so without codes, gets those that ppd-pool build gives.
            precision = snapshot.precision if snapshot.has_graph else Precision.INT8
            made = build(
                given,
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
            index_file.write(made, new)
            with self._writing:
                try:
                    grown = self._grown(made)
                    self.payloads.adopt(before + 1, keys)
                except BaseException:
                    new.unlink(missing_ok=True)
                    raise
                with self._turning:
                    self._serve(grown)
                index_path(self._folder, before).unlink(missing_ok=True)  # who maps it has it

    def close(self) -> None:
        """When nobody searches any more. Many rows that were added go into the index file first, so
        that the next start need not add them again, one by one.

        Raises:
            IndexFileError: it cannot be written; the next start adds them.
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

    def _grown(self, snapshot: Snapshot) -> tuple[Target | Growth, int]:
        """An index with the rows that came after it; and how many it has itself."""
        living = self.payloads.keys()
        hidden = (~np.isin(snapshot.keys, living)).astype(np.uint8)
        added, vectors = self.payloads.added()
        later = ~np.isin(added, snapshot.keys)
        if vectors is None or not later.any():
            still = Target(snapshot, hidden)
            self._warm(still)
            return still, snapshot.count
        grown = Growth(snapshot, hidden, self._warm)
        grown.add(vectors[later], added[later])
        return grown, snapshot.count

    def _serve(self, made: tuple[Target | Growth, int]) -> None:
        self._rows, self._built = made
        self._filters: OrderedDict[Filter, tuple[int, Target, NDArray[np.int32]]] = OrderedDict()
        self._changed()

    def _changed(self) -> None:
        target, filled = self._there()
        self._living = filled - int(target.hidden[:filled].sum())
        self.version += 1

    def _there(self) -> tuple[Target, int]:
        """What is searched, and how many rows of it are there."""
        rows = self._rows
        if isinstance(rows, Growth):
            count = rows.count  # before its target, which may get room for more
            return rows.target, count
        return rows, rows.snapshot.count

    def _filled(self) -> int:
        return self._there()[1]

    def _hide(self, keys: Sequence[int]) -> None:
        nodes = self._nodes(np.array(sorted(keys), np.int64))
        self.target.hidden[nodes] = 1
        self._changed()

    def _nodes(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Of those keys that have one. Keys ascend with nodes."""
        target, filled = self._there()
        known = target.snapshot.keys[:filled]
        at = np.searchsorted(known, keys)
        there = (at < known.size) & (known[np.minimum(at, known.size - 1)] == keys)
        return np.asarray(at[there], np.int32)

    def _filtered(self, wanted: Filter) -> tuple[Target, NDArray[np.int32]]:
        """What a filter leaves, kept until the collection changes."""
        kept = self._filters.get(wanted)
        if kept is not None and kept[0] == self.version:
            return kept[1], kept[2]
        for _ in range(_UNDISTURBED):
            with self._turning:
                version = self.version
            keys = self.payloads.matching(wanted)
            with self._turning:
                if self.version == version:
                    return self._match(wanted, keys)
        with self._turning:
            return self._match(wanted, self.payloads.matching(wanted))

    def _match(self, wanted: Filter, keys: NDArray[np.int64]) -> tuple[Target, NDArray[np.int32]]:
        nodes = self._nodes(keys)
        target = self.target
        hidden = np.ones_like(target.hidden)
        hidden[nodes] = target.hidden[nodes]
        made = Target(target.snapshot, hidden)
        among = nodes[hidden[nodes] == 0]
        self._filters[wanted] = self.version, made, among
        while len(self._filters) > _FILTERS_KEPT:
            self._filters.popitem(last=False)
        return made, among


def _shown(target: Target, filled: int) -> NDArray[np.int32]:
    return np.flatnonzero(target.hidden[:filled] == 0).astype(np.int32)
