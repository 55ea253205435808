"""The card's kernels compile for cards: not collected by itself, see ``test_ann_cuda.py``."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ppd.ann.cuda import kernels
from ppd.ann.cuda.lanes import OPTIONS, warps_of


@pytest.mark.parametrize(
    ("capability", "codes", "kept"),
    [(80, "fp32", 64), (80, "i8", 1024), (90, "fp16", 64), (90, "i8", 1024)],
)
def test_they_compile_for_cards(capability: int, codes: str, kept: int) -> None:
    """To machine code, by the compiler that Triton brings: no card is needed."""
    types = {
        "codes": f"*{codes}",
        "kept": "*i64",
        "words": "*i64",
        "seeds": "i32",
        "scale": "fp32",
        **dict.fromkeys(("incoming", "query", "exact_query", "seed_rows", "exact"), "*fp32"),
    }
    constants = {
        kernels.admit: {
            "PART": 128,
            "BLOCK": 64,
            "SEEN": 8192,
            "ENTRIES": 4,
            "SEEDS_AT_ONCE": 128,
            "EXACT": True,
        },
        kernels.extend: {
            "PART": 128,
            "DEGREE": 32,
            "NEW": 32,
            "KEPT": kept,
            "SEEN": 8192,
        },
        kernels.measure_again: {"PART": 128, "KEPT": kept, "AT_ONCE": 32},
    }
    options = {**OPTIONS, "num_warps": warps_of(kept)}
    for kernel, some in constants.items():
        fixed = {"DIM": 384, "ITOPK": 1024, **some}
        signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
        signature |= dict.fromkeys(fixed, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
