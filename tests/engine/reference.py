"""transformers' own output of a model, which the engine's is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_patches.cpu import stand_ins


def reference_model(folder: Path) -> Any:
    """Load a model with transformers, in float32."""
    stand_ins.install()  # transformers imports torchvision
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy_ids(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Generate greedily from a prompt, past the end-of-sequence token."""
    import torch

    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    ids: list[int] = whole[0, len(prompt) :].tolist()
    return ids
