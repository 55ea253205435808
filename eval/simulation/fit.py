"""Fits a cost model's free parameters to measured times: least squares of relative errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .cost_model import Serving

_NUDGE = 0.04  # how far it looks around: medians of few turns are steps
_MAX_CHANGE = 0.3  # of a parameter in a round
_RIDGE = 1e-6
_ROUNDS = 8


def fit(start: Serving, free: Sequence[str], errors: Callable[[Serving], list[float]]) -> Serving:
    """Fit parameters by the Gauss-Newton method, from ``start``.

    Args:
        free: fields of ``Serving`` that may change; none of them 0.
        errors: relative ones, of each measurement.
    """
    serving = start
    for _ in range(_ROUNDS):
        now = errors(serving)
        slopes = []
        for name in free:
            moved = replace(serving, **{name: getattr(serving, name) * (1 + _NUDGE)})
            slopes.append([(b - a) / _NUDGE for a, b in zip(now, errors(moved), strict=True)])
        normal = [[_dot(a, b) for b in slopes] for a in slopes]
        for i, row in enumerate(normal):
            row[i] += _RIDGE
        change = _solve(normal, [-_dot(a, now) for a in slopes])
        changed = {
            name: getattr(serving, name) * (1 + max(-_MAX_CHANGE, min(_MAX_CHANGE, by)))
            for name, by in zip(free, change, strict=True)
        }
        serving = replace(serving, **changed)
    return serving


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination; ``matrix`` is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
