"""The router of an emulated cluster has the cluster's clocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from eval.emulation.router import configuration
from router.config.file import read_config
from router.config.options import RouterConfig

_PROGRAM = """
import json, sys, time
real = time.monotonic, time.perf_counter
from eval.emulation.router import main
try:
    main(["10", "", "--version"])
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


def test_requests_may_wait_longer(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(configuration(10, 'placement = "load"'))
    config, usual = read_config(str(path), {}), RouterConfig()
    assert config.answer_timeout_s == 10 * usual.answer_timeout_s
    assert config.placement == "load"
    assert config.idle_timeout_s == 10 * usual.idle_timeout_s
    assert config.admission == replace(usual.admission, max_wait_s=10 * usual.admission.max_wait_s)
