"""All comparisons of a study together: which differences are more than chance.

With many comparisons some intervals miss zero by chance. Holm's procedure bounds the probability of
any false verdict by 5 % (S. Holm, "A simple sequentially rejective multiple test procedure", 1979).
The verdicts of ``ppd``, of the same policy again, and of foresight are three families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

_ALPHA = 0.05

Judgement = dict[str, Any]


def p_value(difference: float, drawn: NDArray[np.float64], windows: int) -> float:
    """Return the two-sided probability of such a difference by chance.

    The bootstrap draws few windows, so its spread is too small by ``sqrt((n - 1) / n)``, and the
    tails are those of Student's t with ``n - 1`` degrees of freedom.

    Args:
        drawn: the difference in each draw of the bootstrap.
        windows: how many windows it draws from. One has no spread of its own: p is 1.
    """
    deviation = float(np.std(drawn))
    if deviation == 0.0:
        return 1.0 if difference == 0.0 else 0.0
    if windows < 2:
        return 1.0
    error = deviation * math.sqrt(windows / (windows - 1))
    return float(2.0 * student_t.sf(abs(difference) / error, windows - 1))


def p_in_window(difference: float, drawn: NDArray[np.float64]) -> float:
    """Return the two-sided probability of a difference, where its window is the only one.

    Conversations are drawn again, so it is about those of this window and this run. Where most
    draws lie on the other side of zero than the difference, it is 1.

    Args:
        drawn: the difference in each draw of the bootstrap.
    """
    beyond = np.count_nonzero(drawn >= 0.0 if difference < 0.0 else drawn <= 0.0)
    return float(min(1.0, 2.0 * (beyond + 1) / (len(drawn) + 1)))


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which of some hypotheses are rejected at 5 %, all together."""
    rejected = [False] * len(p_values)
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > _ALPHA / (len(p_values) - place):
            break
        rejected[index] = True
    return rejected


def correct(judgements: Sequence[Judgement]) -> None:
    """Replace all verdicts by those that hold together; those about foresight apart from others."""
    verdicts = _all_verdicts(judgements)
    for verdict, differs in zip(verdicts, holm([one["p"] for one in verdicts]), strict=True):
        # The difference is rounded; rows from before this field have it alone.
        better = verdict.get("better", verdict["difference"] < 0)
        verdict["verdict"] = _named(differs, better)
    twice = [verdict for verdict in verdicts if "p_again" in verdict]
    for verdict, differs in zip(twice, holm([one["p_again"] for one in twice]), strict=True):
        verdict["again_ties"] = not differs
    foreseen = [verdict["foreseen"] for verdict in verdicts if "p" in verdict.get("foreseen", ())]
    for one, differs in zip(foreseen, holm([one["p"] for one in foreseen]), strict=True):
        one["verdict"] = _named(differs, one["better"])


def _named(differs: bool, better: bool) -> str:
    return ("beats" if better else "loses") if differs else "ties"


def summary(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Count the verdicts, and sum what the clairvoyant wins.

    ``clairvoyant_gain`` is how much less it costs (``clairvoyant``) than the best static policy, as
    a share, in the windows that it served. ``clairvoyant_share`` is the part of that which ``ppd``
    wins; None if there is nothing to win, or nothing was foreseen. ``clairvoyant_wins`` counts
    where foresight alone beats the best static policy; None if that was not tested. ``a_a_ties`` is
    None if no way was served again.
    """
    verdicts = _all_verdicts(judgements)
    traces = dict.fromkeys(judgement["trace"] for judgement in judgements)
    again = [one["again_ties"] for one in verdicts if "again_ties" in one]
    named = [verdict["verdict"] for verdict in verdicts]
    return {
        "wins": named.count("beats"),
        "ties": named.count("ties"),
        "losses": named.count("loses"),
        "comparisons": len(verdicts),
        **_gains(verdicts),
        "a_a_ties": f"{sum(again)} of {len(again)}" if again else None,
        "by_trace": {
            trace: _gains(_all_verdicts([one for one in judgements if one["trace"] == trace]))
            for trace in traces
        },
    }


def clairvoyant(foreseen: Mapping[str, Any]) -> float:
    """Return what a clairvoyant costs: the least of each policy, foresight, and the windows' best.

    A cost is a sum of two geometric means, and so costs of windows do not add up. Where windows
    differ much, the best of each may cost more than foresight in all of them.
    """
    ways = ("clairvoyant", "foresight", "ppd", "best")
    return float(min(foreseen[way] for way in ways if way in foreseen))


def _all_verdicts(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    return [verdict for judgement in judgements for verdict in judgement["verdicts"]]


def _wins(foreseen: Sequence[dict[str, Any]]) -> str | None:
    named = [one["verdict"] for one in foreseen if "verdict" in one]
    return f"{named.count('beats')} of {len(named)}" if named else None


def _gains(verdicts: Sequence[dict[str, Any]]) -> dict[str, float | str | None]:
    at = [verdict["foreseen"] for verdict in verdicts if "foreseen" in verdict]
    best = sum(foreseen["best"] for foreseen in at)
    to_win = best - sum(clairvoyant(foreseen) for foreseen in at)
    ours = best - sum(foreseen["ppd"] for foreseen in at)
    return {
        "clairvoyant_wins": _wins(at),
        "clairvoyant_gain": round(to_win / best, 4) if best else None,
        "clairvoyant_share": round(ours / to_win, 3) if to_win > 0 else None,
    }
