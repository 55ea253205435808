"""One launch of a fixed size: recorded once as a CUDA graph, then replayed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray


class Launch:
    """
    Args:
        size: programs; those that nobody needs get no lane, and end at once.
        kernel: launches on places, (size,) int32, and writes results, (2, size) int32.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        kernel: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._places = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._results = torch.zeros((2, size), dtype=torch.int32, device=device)
        self._kernel = kernel
        self._graph = self._recorded() if device.type == "cuda" else None

    def run(self, places: NDArray[np.int64]) -> None:
        """At most ``size`` of them."""
        padded = np.full(self._places.shape[0], -1, np.int32)
        padded[: places.size] = places
        self._places.copy_(torch.from_numpy(padded))
        if self._graph is None:
            self._kernel(self._places, self._results)
        else:
            self._graph.replay()

    def read(self, count: int) -> NDArray[np.int32]:
        """(2, count), when the launch is done."""
        results: NDArray[np.int32] = self._results[:, :count].cpu().numpy()
        return results

    def _recorded(self) -> torch.cuda.CUDAGraph:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._kernel(self._places, self._results)  # compiles; no lane is on it
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Another thread may warm up another index meanwhile: its calls are none of this record's.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._kernel(self._places, self._results)
        return graph
