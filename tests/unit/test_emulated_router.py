"""The router of an emulated cluster has the cluster's clocks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, sys, time
real = time.monotonic, time.perf_counter
from eval.emulation.router import main
try:
    main(["10", "--version"])
except SystemExit as ended:
    print(json.dumps([ended.code, time.monotonic() / real[0](), time.perf_counter() / real[1]()]))
"""


def test_its_clocks_are_slowed() -> None:
    """In a process of its own: modules keep the clock that they were imported with."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    version, clocks = ran.stdout.strip().splitlines()
    assert version[0].isdigit(), "the router ran"
    code, *ratios = json.loads(clocks)
    assert not code
    assert ratios == pytest.approx([0.1, 0.1], rel=1e-3)
