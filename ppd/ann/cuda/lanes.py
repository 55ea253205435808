"""Lanes whose state stays on the GPU, and the launches of their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels as cpu
from ..lanes import ENTRIES, Advanced
from ..snapshot import Snapshot
from ..space import Rows
from . import kernels
from .launch import Launch
from .mirror import Mirror

SIZES = (64, 256, 1024, 2048)  # programs of a launch
MIN_KEPT = 64
_MIN_WARPS = 4  # a step of fewer waits longer for its rows
_MAX_SEEN = 8192  # slots; a wider search loses more entries and measures some nodes again
_SEEDS_AT_ONCE = 128
_VALUES = 4096  # values of rows that a program holds at once
_MAX_PART = 128
_AGAIN_AT_ONCE = 32  # kept nodes that a program measures again
OPTIONS = {"enable_fp_fusion": True}  # explicit, because Triton's default is about to change


def warps_of(kept: int) -> int:
    """The warps of a program whose lane keeps ``kept`` words."""
    return max(_MIN_WARPS, kept // MIN_KEPT)


class CudaLaneSet:
    """Lanes on the GPU.

    Args:
        snapshot: the snapshot to search.
        mirror: its copy on the device.
        device: the device.
        lanes: number of lanes, at most the largest of ``SIZES``.
        itopk: the largest itopk of a search.

    Attributes:
        free: the lanes that are free.
    """

    def __init__(
        self, snapshot: Snapshot, mirror: Mirror, device: torch.device, lanes: int, itopk: int
    ) -> None:
        assert lanes <= SIZES[-1], "as many as one launch takes"
        self._snapshot = snapshot
        self._mirror = mirror
        self._device = device
        self._dimensions = snapshot.graph.codes.shape[1]
        self._degree = snapshot.graph.neighbours.shape[1]
        self._edges = int(_powers_of_2(np.array(self._degree)))
        self._itopk = int(self._kept_for(np.array(itopk)))
        seen = int(self._seen_for(np.array(itopk)))
        self._query = self._zeros((lanes, self._dimensions), torch.float32)
        self._exact_query: torch.Tensor | None = None
        if snapshot.exact.shape[0]:
            self._exact_query = self._zeros((lanes, self._dimensions), torch.float32)
        self._kept = self._zeros((lanes, self._itopk), torch.int64)
        self._seen = self._zeros((lanes, seen), torch.int32)
        self._seen_size = self._zeros((lanes,), torch.int32)
        self._width = self._zeros((lanes,), torch.int32)
        self._steps = self._zeros((1,), torch.int32)
        self._widths = np.ones(lanes, np.int32)  # on the host too, to group lanes into launches
        self._finished = np.zeros(lanes, np.bool_)
        self._launches: dict[tuple[int, int], Launch] = {}
        self.free = list(range(lanes))[::-1]

    def admit(self, queries: Rows, widths: Sequence[int]) -> list[int]:
        """See ``LaneSet``."""
        assert len(widths) <= len(self.free), "more queries than free lanes"
        places = [self.free.pop() for _ in widths]
        self._mirror.catch_up(self._snapshot)
        wide = np.array(widths, np.int32)
        self._widths[places] = wide
        self._finished[places] = False
        settings = np.stack([np.array(places, np.int32), wide, self._seen_for(wide)], axis=1)
        mirror = self._mirror
        exact = self._exact_query is not None
        kernels.admit[(len(places),)](
            self._sent(settings),
            self._sent(np.ascontiguousarray(queries)),
            self._snapshot.scale,
            mirror.seed_ids,
            mirror.seed_rows,
            mirror.seed_ids.shape[0],
            mirror.codes,
            self._query,
            self._exact_query if exact else self._query,
            self._kept,
            self._seen,
            self._seen_size,
            self._width,
            DIM=self._dimensions,
            PART=self._part(ENTRIES),
            BLOCK=cpu.BLOCK,
            ITOPK=self._itopk,
            SEEN=self._seen.shape[1],
            ENTRIES=ENTRIES,
            SEEDS_AT_ONCE=_SEEDS_AT_ONCE,
            EXACT=exact,
            **OPTIONS,
        )
        return places

    def advance(
        self,
        places: Sequence[int],
        steps: int,
        limits: Sequence[int],
        hidden: Sequence[NDArray[np.uint8]],
    ) -> Advanced:
        """See ``LaneSet``."""
        done = self._step(np.array(places, np.int64), steps)
        finished = self._finished[places]
        shape = len(places), max(limits)
        near, nodes = np.empty(shape, np.float32), np.empty(shape, np.int32)
        if (over := np.flatnonzero(finished)).size:
            read = over.tolist()
            found = self.release(
                [places[i] for i in read], [limits[i] for i in read], [hidden[i] for i in read]
            )
            cut = slice(0, found[0].shape[1])
            near[over, cut], nodes[over, cut] = found
        return Advanced(done, finished, near, nodes)

    def release(
        self, places: Sequence[int], limits: Sequence[int], hidden: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See ``LaneSet``."""
        near = np.full((len(places), max(limits)), np.inf, np.float32)
        nodes = np.full((len(places), max(limits)), -1, np.int32)
        lanes = np.array(places, np.int64)
        for kept, which in self._by_kept(lanes):
            words = self._collected(lanes[which], kept)
            of_which = [hidden[i] for i in which]
            cut = slice(0, near.shape[1])
            nearest = words[:, cut].cpu().numpy()
            ids = kernels.nodes_of(nearest)
            if _hides(of_which, ids).any():
                near[which, cut], nodes[which, cut] = _visible(of_which, words, near.shape[1])
            else:
                cut = slice(0, ids.shape[1])
                near[which, cut] = kernels.distances_of(nearest)
                nodes[which, cut] = ids
        self.free.extend(places)
        return near, nodes

    def rows_read(self, places: Sequence[int]) -> int:
        """How many rows the last searches in lanes have measured, but for a few that were lost."""
        lanes = self._sent(np.array(places, np.int64))
        slots = torch.arange(self._seen.shape[1], device=self._device)
        used = slots[None, :] < self._seen_size[lanes][:, None]
        return int(((self._seen[lanes] >= 0) & used).sum())

    def _step(self, places: NDArray[np.int64], steps: int) -> int:
        """Do up to ``steps`` expansions in each lane; returns how many were done in all."""
        self._mirror.catch_up(self._snapshot)
        self._steps.fill_(steps)
        begun = []
        for kept, which in self._by_kept(places):
            launch = self._launch(which.size, kept)
            launch.run(places[which])
            begun.append((launch, places[which]))
        done = 0
        for launch, group in begun:
            expanded, finished = launch.read(group.size)
            done += int(expanded.sum())
            self._finished[group] = finished.astype(np.bool_)
        return done

    def _collected(self, places: NDArray[np.int64], kept: int) -> torch.Tensor:
        """The words of lanes, (places, kept), nearest first."""
        lanes = self._sent(places)
        if self._exact_query is None:
            words = self._kept[lanes, :kept]
        else:
            words = self._zeros((places.size, kept), torch.int64)
            kernels.measure_again[(places.size, kept // _AGAIN_AT_ONCE)](
                lanes,
                self._kept,
                self._exact_query,
                self._mirror.exact,
                words,
                DIM=self._dimensions,
                PART=self._part(_AGAIN_AT_ONCE),
                KEPT=kept,
                ITOPK=self._itopk,
                AT_ONCE=_AGAIN_AT_ONCE,
                **OPTIONS,
            )
            words = words.sort(1).values
        return words

    def _launch(self, count: int, kept: int) -> Launch:
        size = next(size for size in SIZES if size >= count)
        if (size, kept) not in self._launches:
            self._launches[size, kept] = Launch(size, self._device, partial(self._extend, kept))
        return self._launches[size, kept]

    def _extend(self, kept: int, places: torch.Tensor, results: torch.Tensor) -> None:
        mirror = self._mirror
        kernels.extend[(places.shape[0],)](
            places,
            self._steps,
            mirror.neighbours,
            mirror.codes,
            self._query,
            self._kept,
            self._seen,
            self._seen_size,
            self._width,
            results[0],
            results[1],
            DIM=self._dimensions,
            PART=self._part(self._edges),
            DEGREE=self._degree,
            NEW=self._edges,
            KEPT=kept,
            ITOPK=self._itopk,
            SEEN=self._seen.shape[1],
            num_warps=warps_of(kept),
            **OPTIONS,
        )

    def _by_kept(self, places: NDArray[np.int64]) -> Iterable[tuple[int, NDArray[np.int64]]]:
        """Group lanes into launches; the group of a lane does not depend on the other lanes.

        Returns:
            For each launch, the number of kept words and the indices into ``places``.
        """
        kept = self._kept_for(self._widths[places])
        return [(int(each), np.flatnonzero(kept == each)) for each in np.unique(kept)]

    def _kept_for(self, widths: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.maximum(_powers_of_2(widths), max(MIN_KEPT, self._edges))

    def _seen_for(self, widths: NDArray[np.int32]) -> NDArray[np.int32]:
        slots = cpu.SEEN_PER_ITOPK * _powers_of_2(widths)
        return np.clip(slots, cpu.MIN_SEEN, _MAX_SEEN).astype(np.int32)

    def _part(self, rows: int) -> int:
        """The number of dimensions of ``rows`` rows to read at once."""
        part = _MAX_PART
        while self._dimensions % part or part * rows > _VALUES:
            part //= 2
        return part

    def _zeros(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=self._device)

    def _sent(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _powers_of_2(numbers: NDArray[np.int32]) -> NDArray[np.int64]:
    """Round numbers up to powers of 2."""
    return np.left_shift(1, np.ceil(np.log2(numbers)).astype(np.int64))


def _hides(hidden: Sequence[NDArray[np.uint8]], nodes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each node must not be found.

    Args:
        hidden: for each row of ``nodes`` (n,) uint8; 1 for a node that must not be found.
        nodes: (rows, k); -1 for none.
    """
    if all(one is hidden[0] for one in hidden):  # those of one target, without a copy for each
        marks = hidden[0][nodes]
    else:
        marks = np.stack([one[row] for one, row in zip(hidden, nodes, strict=True)])
    hides: NDArray[np.bool_] = (marks != 0) & (nodes >= 0)
    return hides


def _visible(
    hidden: Sequence[NDArray[np.uint8]], words: torch.Tensor, limit: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The squared distances and nodes of words, (rows, limit), without those that are hidden."""
    every = words.cpu().numpy()
    nodes = kernels.nodes_of(every)
    visible = (nodes >= 0) & ~_hides(hidden, nodes)
    order = np.argsort(~visible, axis=1, kind="stable")[:, :limit]
    seen = np.take_along_axis(visible, order, 1)
    near = np.where(
        seen, np.take_along_axis(kernels.distances_of(every), order, 1), np.float32(np.inf)
    )
    return near, np.where(seen, np.take_along_axis(nodes, order, 1), np.int32(-1))
