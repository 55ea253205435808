"""Stand-ins for two packages that SGLang imports at module level.

They have no wheel for an x86 machine without AMX: the CPU build of ``sgl_kernel``, and a
``torchvision`` whose C++ operators load against a CPU build of torch. This module supplies the
names. The kernels of speculative decoding are in ``speculation.py``; any other one raises when it
is called.

A stand-in never shadows the real package: if ``sgl_kernel`` is installed, or
torchvision's own library loads, that part is not replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from sglang_patches.cpu.speculation import KERNELS

# The names that SGLang 0.5.21 and 0.5.23 import from sgl_kernel when they run on a CPU
# (mem_cache, speculative and kernels/ops modules, at import time), beside ``speculation.KERNELS``.
# These serve trees of drafts, and EAGLE drafts of several layers.
UNUSED_KERNELS = (
    "fill_accept_out_cache_loc_cpu",
    "rotate_input_ids_cpu",
)

# Operators that torchvision 0.28's _meta_registrations describes and so needs declared.
_VISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input) -> Tensor",
    "qroi_align(Tensor input) -> Tensor",
    "_roi_align_backward(Tensor grad) -> Tensor",
    "ps_roi_align(Tensor input) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad) -> Tensor",
    "roi_pool(Tensor input) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad) -> Tensor",
    "ps_roi_pool(Tensor input) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad) -> Tensor",
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> Tensor",
)

_MARK = "__ppd_stand_in__"


def install() -> None:
    """Put the stand-ins in place for this process. Idempotent."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _kernel_module()
    _declare_vision_ops()


def is_installed() -> bool:
    """Whether this process was started through the CPU launcher."""
    return hasattr(sys.modules.get("sgl_kernel"), _MARK)


def _kernel_module() -> ModuleType:
    module = ModuleType("sgl_kernel", "Stand-in: names only, see sglang_patches.cpu.stand_ins")
    # importlib.util.find_spec("sgl_kernel") raises on a module without a spec.
    module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", loader=None)
    setattr(module, _MARK, True)
    for name in UNUSED_KERNELS:
        setattr(module, name, _absent(name))
    for name, kernel in KERNELS.items():
        setattr(module, name, kernel)
    return module


def _absent(name: str) -> Any:
    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU build on this machine; install sgl-kernel-cpu to use it"
        )

    call.__name__ = name
    return call


_vision_library: Any = None  # torch.library.Library withdraws its operators when collected


def _declare_vision_ops() -> None:
    global _vision_library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _vision_library is not None:
        return
    import torch

    if hasattr(torch.ops.torchvision, "nms") or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:  # built for another torch: the wheel on PyPI is the CUDA one
        _vision_library = torch.library.Library("torchvision", "DEF")
        for schema in _VISION_OPS:
            _vision_library.define(schema)
