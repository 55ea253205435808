"""The card's kernels find what they should, and compile for cards.

Both in processes of their own: Triton must know before it is imported that it shall interpret, and
its compiler has complaints about itself when its process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("cases", ["ann_cuda_cases.py", "ann_cuda_compiling.py"])
def test_the_cards_kernels(cases: str) -> None:
    told = dict(os.environ)
    if cases == "ann_cuda_cases.py" and not torch.cuda.is_available():
        told["TRITON_INTERPRET"] = "1"
    path = str(Path(__file__).with_name(cases))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
