"""The GPU as a backend of engines."""

from __future__ import annotations

import weakref

import torch

from ppd.errors import ConfigError, IndexFileError

from ..lanes import Backend
from ..searches import MAX_ITOPK
from ..snapshot import Snapshot
from .lanes import MIN_KEPT, CudaLaneSet
from .mirror import Mirror

_LANES = 1024


def cuda_backend() -> Backend:
    """The GPU as the backend of an engine.

    Raises:
        ConfigError: PyTorch finds no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError('device = "cuda": PyTorch finds no CUDA device')
    return backend_on(torch.device("cuda"), _LANES)


def backend_on(device: torch.device, lanes: int) -> Backend:
    """A device as the backend of an engine.

    Each snapshot is copied to the device once. The copy is shared by all its lane sets, and is
    freed with the snapshot. On the device "cpu", Triton must interpret the kernels
    (``TRITON_INTERPRET=1``), which is slow and meant for tests.

    Args:
        device: the device.
        lanes: lanes of an engine, per snapshot.
    """
    mirrors: weakref.WeakKeyDictionary[Snapshot, Mirror] = weakref.WeakKeyDictionary()

    def make(snapshot: Snapshot, lanes: int, itopk: int) -> CudaLaneSet:
        try:
            mirror = mirrors.get(snapshot)
            if mirror is None:
                mirror = mirrors[snapshot] = Mirror(snapshot, device)
            return CudaLaneSet(snapshot, mirror, device, lanes, itopk)
        except torch.OutOfMemoryError as error:
            raise IndexFileError(f"the card is full: {error}") from error

    widths = [MIN_KEPT]
    while widths[-1] < MAX_ITOPK:
        widths.append(2 * widths[-1])
    return Backend(lanes, max(1, lanes // 16), True, tuple(widths), make)
