"""LoRA on a CPU: upstream's ``torch_native`` backend, without pinned memory.

Upstream copies small tensors through pinned memory (lora/layers.py:475, lora/backend/
torch_backend.py:219), which a machine without accelerator has none of. A copy within the memory
of one machine needs none.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Patch the two modules in this process.

    Raises:
        AttributeError: SGLang has moved one of the modules' names.
    """
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        getattr(module, "torch")  # noqa: B009 (it must exist)
        setattr(module, "torch", _Unpinned(torch))  # noqa: B010
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010


class _Unpinned:
    """``torch``, whose constructors ignore ``pin_memory``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        """See ``torch.tensor``."""
        return self._torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        """See ``torch.zeros``."""
        return self._torch.zeros(*args, **kwargs)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        """See ``torch.empty``."""
        return self._torch.empty(*args, **kwargs)
