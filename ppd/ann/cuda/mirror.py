"""The copy of a snapshot's arrays on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppd.errors import IndexFileError

from ..snapshot import Snapshot
from .launch import RECORDING

_AT_ONCE_BYTES = 1 << 23  # per transfer, because searches wait for its end


class Mirror:
    """A copy of a snapshot's arrays on a device.

    Attributes:
        codes: (n, width) float32, float16 or int8.
        neighbours: (n, degree) int32.
        seed_ids: as in the snapshot's graph.
        seed_rows: as in the snapshot's graph.
        exact: (n, width) float32, or (0, 0).

    Raises:
        IndexFileError: the arrays do not fit into the device's memory.
    """

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        graph = snapshot.graph
        arrays = graph.codes, graph.neighbours, graph.seed_ids, graph.seed_rows, snapshot.exact
        self._device = device
        self._sent = len(snapshot.written)
        _check_room(sum(array.nbytes for array in arrays), device)
        self.codes = self._copy(graph.codes)
        self.neighbours = self._copy(graph.neighbours)
        self.seed_ids = self._copy(graph.seed_ids)
        self.seed_rows = self._copy(graph.seed_rows)
        self.exact = self._copy(snapshot.exact)

    def catch_up(self, snapshot: Snapshot) -> None:
        """Send the rows and edges that were written since the last call."""
        until = len(snapshot.written)
        if until == self._sent:
            return
        graph = snapshot.graph
        changed = np.unique(np.array(snapshot.written[self._sent : until], np.int64))
        edges = graph.neighbours[changed]
        # Read after the edges, so that it includes every row that they lead to.
        rows = np.unique(np.array(snapshot.written[self._sent :], np.int64))
        places = self._copy(rows)
        if self.exact.shape[0]:
            self.exact[places] = self._copy(snapshot.exact[rows])
        self.codes[places] = self._copy(graph.codes[rows])
        self.neighbours[self._copy(changed)] = self._copy(edges)
        self._sent = until

    def _copy(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.uint16:  # half precision, as the compiled CPU code stores it
            array = array.view(np.float16)
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        copy = torch.empty(array.shape, dtype=kind, device=self._device)
        row_bytes = array.nbytes // max(1, array.shape[0])
        rows = max(1, _AT_ONCE_BYTES // max(1, row_bytes))
        for begin in range(0, array.shape[0], rows):
            part = np.array(array[begin : begin + rows])  # torch requires writable memory
            copy[begin : begin + rows] = torch.from_numpy(part)
        return copy


def _check_room(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    with RECORDING:
        torch.cuda.empty_cache()  # memory that PyTorch caches is free, too
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise IndexFileError(
            f"the index needs {needed / 2**30:.1f} GiB on the card, {free / 2**30:.1f} are free; "
            'int8 rows need the least, or device = "cpu"'
        )
