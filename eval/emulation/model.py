"""The small model that emulated workers serve, and the tokens of their replies."""

from __future__ import annotations

import string
from dataclasses import replace

from .. import tiny_model
from ..tiny_layers import Family
from ..tiny_model import ModelSpec

# One layer with one head of 16: 64 bytes of KV a token, so that a million tokens fit.
MODEL = ModelSpec(
    dtype="bfloat16", layers=1, hidden=16, heads=1, kv_heads=1, max_context_tokens=131_072
)
# With DP attention, which the other has not upstream; as much KV.
RANKED_MODEL = replace(MODEL, family=Family.QWEN3_MOE)
_FIRST = len(tiny_model.SPECIAL_TOKENS) + string.printable.index("a")
LETTERS = range(_FIRST, _FIRST + len(string.ascii_lowercase))  # ids of its tokenizer
