"""The patches that docs/UPSTREAM.md proposes, on a copy of SGLang that has all of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Reproduction, reproducing

_PATCHES = sorted((Path(__file__).parent / "patches").glob("*.diff"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory, version: str) -> Iterator[Reproduction]:
    """Reproductions on a patched copy of SGLang, without the plugin's hooks."""
    if version != "0.5.23":
        pytest.skip("the patches are for 0.5.23")
    folder = tmp_path_factory.mktemp("patched")
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    python = folder / "python"
    original = Path(spec.origin).parent
    shutil.copytree(original, python / "sglang", copy_function=os.symlink)
    for patch in _PATCHES:
        name = patch.read_text().splitlines()[0].removeprefix("--- a/python/sglang/")
        target = python / "sglang" / name
        target.unlink()
        shutil.copyfile(original / name, target)
        subprocess.run(["patch", "-p1", "-i", str(patch)], cwd=folder, check=True)
    with reproducing(folder, PYTHONPATH=str(python)) as (_interpreter, run):
        yield run


def test_the_document_has_the_patches() -> None:
    document = (Path(__file__).parents[2] / "docs" / "UPSTREAM.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", document, re.DOTALL)
    assert sorted(shown) == sorted(path.read_text() for path in _PATCHES)


def test_a_patched_server_does_not_stand_still(patched: Reproduction) -> None:
    outcome = patched("stand_still")
    assert outcome["steps_after_the_transfer"] > 0
    assert (outcome["retracted"], outcome["in_transfer"]) == (0, 0)


def test_a_patched_server_streams_tokens_alone(patched: Reproduction) -> None:
    assert patched("empty_event") == {"events": [["a", 1]]}


def test_each_sample_of_a_patched_server_has_a_room(patched: Reproduction) -> None:
    assert patched("samples") == {"rooms": [5, 6]}


def test_a_patched_rank_takes_its_own_rooms(patched: Reproduction) -> None:
    assert patched("data_parallel") == {"rank": 1, "refused": [2]}
