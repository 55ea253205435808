"""The maker of small models: the same seed gives the same files, and text round-trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from eval.tiny_layers import Family
from eval.tiny_model import ModelSpec, Vocabulary, ensure


@pytest.mark.parametrize("family", list(Family))
def test_the_same_spec_gives_the_same_files(tmp_path: Path, family: Family) -> None:
    spec = ModelSpec(family=family)
    one, two = ensure(spec, tmp_path / "a"), ensure(spec, tmp_path / "b")
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    other = ensure(ModelSpec(family=family, seed=1), tmp_path / "a")
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (one / weights).read_bytes()
    assert json.loads((one / "config.json").read_text())["dtype"] == "float32"


def test_a_made_model_is_not_made_again(tmp_path: Path) -> None:
    folder = ensure(root=tmp_path)
    mark = folder / "mark"
    mark.touch()
    assert ensure(root=tmp_path) == folder
    assert mark.exists()
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[Vocabulary, Tokenizer]:
    root = tmp_path_factory.mktemp("models")
    return {
        v: Tokenizer.from_file(str(ensure(ModelSpec(vocabulary=v), root) / "tokenizer.json"))
        for v in Vocabulary
    }


@given(ids=st.lists(st.integers(6, 102), max_size=60))
def test_characters_round_trip(tokenizers: dict[Vocabulary, Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers[Vocabulary.CHARACTERS]
    assert tokenizer.get_vocab_size() == 103
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids == ids


def test_bpe_does_not(tokenizers: dict[Vocabulary, Tokenizer]) -> None:
    tokenizer = tokenizers[Vocabulary.BPE]
    merged = tokenizer.encode("ba", add_special_tokens=False).ids
    apart = [i for text in "ba" for i in tokenizer.encode(text, add_special_tokens=False).ids]
    assert len(merged) == 1
    assert len(apart) == 2
    assert tokenizer.decode(apart) == tokenizer.decode(merged)
