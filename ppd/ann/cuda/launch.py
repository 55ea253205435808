"""A kernel launch of a fixed size, recorded once as a CUDA graph and then replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

# PyTorch records one graph at a time in a process, and must not empty its cache meanwhile.
RECORDING = threading.Lock()


class Launch:
    """A launch of a kernel on up to ``size`` lanes.

    Args:
        size: number of programs; those without a lane end at once.
        device: the device; launches are recorded only on a CUDA device.
        kernel: launches on places, (size,) int32, and writes results, (2, size) int32.
    """

    def __init__(
        self, size: int, device: torch.device, kernel: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        self._places = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._results = torch.zeros((2, size), dtype=torch.int32, device=device)
        launch = partial(kernel, self._places, self._results)
        # A recorded graph keeps no reference to the kernel, and so none to the memory of its lanes.
        self._launch = launch if device.type != "cuda" else _recorded(launch).replay

    def run(self, places: NDArray[np.int64]) -> None:
        """Launch the kernel on at most ``size`` lanes, without waiting for its end."""
        padded = np.full(self._places.shape[0], -1, np.int32)
        padded[: places.size] = places
        self._places.copy_(torch.from_numpy(padded))
        self._launch()

    def read(self, count: int) -> NDArray[np.int32]:
        """Wait for the launch and return the first ``count`` results, (2, count)."""
        results: NDArray[np.int32] = self._results[:, :count].cpu().numpy()
        return results


def _recorded(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    with RECORDING:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            launch()  # compiles; no lane is on it
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Another thread may fill another index meanwhile; its calls must not be recorded.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        return graph
