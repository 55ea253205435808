"""Clustered rows that are drawn on a GPU, because a CPU takes minutes for ten million of them."""

from __future__ import annotations

import torch

_CLUSTERS, _BASES, _INNER = 2000, 64, 24
_CENTRE, _NOISE = 0.6, 0.15
_FLAT_AXES = 8  # axis i has a variance of 1 / (i + this), as embeddings by MiniLM nearly have
_AT_ONCE = 1 << 18


def clustered(count: int, dimensions: int, seed: int, device: torch.device) -> torch.Tensor:
    """Draw clusters of very different sizes, each a tilted ellipsoid in few of the dimensions.

    The variance falls from axis to axis, because that of embeddings of texts does.

    Returns:
        (count, dimensions) float32, on the device.
    """
    source = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source, device=device)

    centres = normal(_CLUSTERS, dimensions)
    bases = normal(_BASES, _INNER, dimensions) / _INNER**0.5
    # A Pareto distribution with exponent 1.2, as the sizes of clusters of texts.
    uniform = torch.rand(_CLUSTERS, generator=source, device=device)
    weights = (1 - uniform) ** (-1 / 1.2) - 0.95
    scale = (torch.arange(dimensions, device=device) + 1.0 + _FLAT_AXES) ** -0.5
    rows = torch.empty((count, dimensions), device=device)
    for begin in range(0, count, _AT_ONCE):
        part = rows[begin : begin + _AT_ONCE]
        chosen = torch.multinomial(weights, part.shape[0], replacement=True, generator=source)
        torch.add(_CENTRE * centres[chosen], normal(*part.shape), alpha=_NOISE, out=part)
        spread = normal(part.shape[0], _INNER)
        for basis in range(_BASES):
            at = torch.nonzero(chosen % _BASES == basis)[:, 0]
            part[at] += spread[at] @ bases[basis]
        part *= scale
    return rows
