"""The card's kernels compile for cards and, interpreted, find what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

CASES = Path(__file__).parent / "ann_cuda_cases.py"


def test_they_find_what_they_should() -> None:
    import torch

    told = dict(os.environ)
    if not torch.cuda.is_available():
        told["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("capability", "codes", "kept"),
    [(80, "fp32", 64), (80, "i8", 1024), (90, "fp16", 64), (90, "i8", 1024)],
)
def test_they_compile_for_cards(capability: int, codes: str, kept: int) -> None:
    """To machine code, by the compiler that Triton brings: no card is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ppd.ann.cuda import kernels
    from ppd.ann.cuda.lanes import LEAST_KEPT, OPTIONS

    types = {
        "codes": f"*{codes}",
        "kept": "*i64",
        "words": "*i64",
        "seeds": "i32",
        **dict.fromkeys(("query", "seed_rows", "exact"), "*fp32"),
    }
    constants = {
        kernels.admit: {"PART": 128, "BLOCK": 64, "SEEN": 8192, "ENTRIES": 4, "SEEDS_AT_ONCE": 128},
        kernels.extend: {"PART": 128, "DEGREE": 32, "NEW": 32, "KEPT": kept, "SEEN": 8192},
        kernels.measure_again: {"PART": 128, "KEPT": kept, "AT_ONCE": 32},
    }
    options = {**OPTIONS, "num_warps": kept // LEAST_KEPT}
    for kernel, some in constants.items():
        fixed = {"DIM": 384, "ITOPK": 1024, **some}
        signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
        signature |= dict.fromkeys(fixed, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
