"""Embeddings of many sentences by the pool's own model, kept from run to run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ppd.ann.minilm import MiniLM, fetch

_PART = 4096  # sentences


def embed(sentences: Sequence[str], where: Path) -> NDArray[np.float32]:
    """Return rows of unit length, (sentences, 384); they are kept in ``where`` for the next time.

    Raises:
        ConfigError: the model cannot be fetched.
    """
    where.mkdir(parents=True, exist_ok=True)
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
