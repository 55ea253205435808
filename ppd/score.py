"""From what both routes cost to which is better, by the operator's wishes.

Algorithm 1 of the PPD paper (arXiv 2603.13358) weighs what a local turn saves in TTFT against
what it costs in TPOT. The alternative are targets: the route more likely to meet them.
Nothing here measures; other wishes only score the same costs again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

import msgspec

from ppd.table import Costs, Noise

_MAX_WEIGHT = 1e6
_TARGETS_MS = (0.001, 1e9)
_Z99 = 2.3263478740408408  # of the normal distribution: where its 99th percentile lies


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weights"):
    """``w_ttft`` and ``w_tpot`` of Algorithm 1."""

    ttft: float = 1.0
    tpot: float = 1.0

    def problem(self) -> str | None:
        if not (0 <= self.ttft <= _MAX_WEIGHT and 0 <= self.tpot <= _MAX_WEIGHT):
            got = f"got ttft={self.ttft}, tpot={self.tpot}"
            return f"weights must be numbers from 0 to {_MAX_WEIGHT:g}, {got}"
        if self.ttft == self.tpot == 0:
            return "one of the weights must be above 0"
        return None


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="targets"):
    """Service-level objectives of a turn; None: any value will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def problem(self) -> str | None:
        given = [target for target in (self.ttft_ms, self.tpot_ms) if target is not None]
        if not given:
            return "one of the targets ttft_ms and tpot_ms must be given"
        low, high = _TARGETS_MS
        if not all(low <= target <= high for target in given):
            got = ", ".join(map(str, given))
            return f"targets must be numbers from {low:g} to {high:g} ms, got {got}"
        return None


Objective = Weights | Targets


@dataclass(frozen=True, slots=True)
class Score:
    """How two routes compare.

    Attributes:
        ttft_saved: share of the remote TTFT that a local turn saves (the paper's delta).
        tpot_lost: share of the remote TPOT that it adds.
        remote, local: what is compared. With weights 0 and Algorithm 1's score; with targets
            the chances to meet them.
        prefers_local: the choice.
    """

    ttft_saved: float
    tpot_lost: float
    remote: float
    local: float
    prefers_local: bool


def score(objective: Objective, remote: Costs, local: Costs) -> Score:
    ttft_saved = (remote.ttft_ms - local.ttft_ms) / remote.ttft_ms
    tpot_lost = (local.tpot_ms - remote.tpot_ms) / remote.tpot_ms
    match objective:
        case Weights():
            points = objective.ttft * ttft_saved - objective.tpot * tpot_lost
            return Score(ttft_saved, tpot_lost, 0.0, points, points > 0)
        case Targets():
            of_remote, of_local = chance(objective, remote), chance(objective, local)
            # Where both are as likely (both certain, both hopeless), as with even weights.
            better = of_local > of_remote or (of_local == of_remote and ttft_saved > tpot_lost)
            return Score(ttft_saved, tpot_lost, of_remote, of_local, better)
        case _:
            assert_never(objective)


def standard_error(weights: Weights, remote: Costs, local: Costs, noise: Noise) -> float:
    """Of Algorithm 1's score."""
    ttft = noise.ttft * local.ttft_ms / remote.ttft_ms
    tpot = noise.tpot * local.tpot_ms / remote.tpot_ms
    return math.hypot(weights.ttft * ttft, weights.tpot * tpot)


def local_within_noise(
    objective: Objective, remote: Costs, local: Costs, measured: Costs, noise: Noise
) -> bool:
    """Whether local would be preferred if it had cost one standard error less when measured.

    After the rule by which the simpler model is taken unless another is better by more than that
    (Breiman et al., Classification and Regression Trees, 1984): local moves no KV.

    Args:
        measured: local, before what is live made it dearer: only that is uncertain.
    """
    kinder = replace(
        local,
        ttft_ms=_less(local.ttft_ms, measured.ttft_ms, noise.ttft),
        tpot_ms=_less(local.tpot_ms, measured.tpot_ms, noise.tpot),
    )
    return score(objective, remote, kinder).prefers_local


def _less(now_ms: float, measured_ms: float, noise: float) -> float:
    error = noise / (1.0 + noise)
    return now_ms - error * min(now_ms, measured_ms)


def chance(targets: Targets, costs: Costs) -> float:
    """The probability that a turn of these costs meets both targets.

    TTFT and TPOT are taken as independent and lognormal, through the measured median and 99th
    percentile.
    """
    return _below(targets.ttft_ms, costs.ttft_ms, costs.ttft_tail) * _below(
        targets.tpot_ms, costs.tpot_ms, costs.tpot_tail
    )


def _below(target: float | None, median: float, tail: float) -> float:
    if target is None:
        return 1.0
    if tail <= 1.0:  # nothing varied
        return 1.0 if median <= target else 0.0
    deviations = (math.log(target) - math.log(median)) * _Z99 / math.log(tail)
    return 0.5 * math.erfc(-deviations / math.sqrt(2.0))
