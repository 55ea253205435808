"""A source tree of SGLang that shadows the installed one: its version, and targets that moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_patches.engines import SUPPORTED


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The installed package as a source tree, of links to its files."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "sglang", copy_function=os.symlink)
    return tmp_path


def check_engine(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run ``ppd-worker --check-engine`` on a source tree."""
    return subprocess.run(
        [sys.executable, "-m", "sglang_patches.worker", "--check-engine"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(Path.cwd())])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_source_tree_is_named_with_its_version(tree: Path) -> None:
    result = check_engine(tree)
    assert result.returncode == 0, result.stdout
    assert f"the source tree {tree}/sglang (0.5." in result.stdout


def test_a_tree_without_a_version_is_read_as_the_newest_and_compared(tree: Path) -> None:
    (tree / "sglang/_version.py").unlink()
    decode = tree / "sglang/srt/disaggregation/decode.py"
    source = decode.read_text()
    decode.unlink()
    decode.write_text(source.replace("def hold_rebootstrap(", "def stage_rebootstrap("))
    result = check_engine(tree)
    assert result.returncode == 1
    assert f"(which declares no version): not supported, read as {SUPPORTED[-1]}" in result.stdout
    assert "DecodePreallocQueue.hold_rebootstrap is missing" in result.stdout
