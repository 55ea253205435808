"""In a process of its own: Triton must be told before it is imported that it shall interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")


def test_the_model_that_is_measured() -> None:
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    path = str(Path(__file__).with_name("gpu_model_cases.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
