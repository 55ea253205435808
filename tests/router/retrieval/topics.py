"""Passages about four topics, and embeddings that tell these apart."""

from __future__ import annotations

TOPICS = ("cats", "dogs", "fish", "other")


def vector_of(text: str) -> list[float]:
    """A vector with 1 for each topic in the text."""
    vector = [float(topic in text) for topic in TOPICS]
    return vector if any(vector) else [0.0, 0.0, 0.0, 1.0]
