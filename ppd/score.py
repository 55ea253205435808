"""The comparison of both routes' costs by the operator's objective.

Algorithm 1 of the PPD paper (arXiv 2603.13358) weighs the TTFT that a local turn saves against
the TPOT that it costs. Its section 4.4 adds the throughput of the cluster. The alternative
objective is a pair of targets: the route that is more likely to meet them is better. Nothing is
measured here: another objective compares the same costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import msgspec

from ppd.table import Costs, Noise

_MAX_WEIGHT = 1e6
_TARGETS_MS = (0.001, 1e9)
_Z99 = 2.3263478740408408  # of the normal distribution: where its 99th percentile lies


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weights"):
    """The weights ``w_ttft``, ``w_tpot`` and ``w_throughput`` of Algorithm 1.

    Attributes:
        ttft: weight of the TTFT that a local turn saves.
        tpot: weight of the TPOT that a local turn costs.
        throughput: weight of the throughput that local turns gain. It counts where the table has
            throughput.
    """

    ttft: float = 1.0
    tpot: float = 1.0
    throughput: float = 0.0

    def problem(self) -> str | None:
        """What is wrong with the weights; None if nothing is."""
        given = (self.ttft, self.tpot, self.throughput)
        if not all(0 <= weight <= _MAX_WEIGHT for weight in given):
            got = f"got ttft={self.ttft}, tpot={self.tpot}, throughput={self.throughput}"
            return f"weights must be numbers from 0 to {_MAX_WEIGHT:g}, {got}"
        if not any(given):
            return "one of the weights must be above 0"
        return None


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="targets"):
    """The service-level objectives of a turn; None for a quantity without a target.

    Attributes:
        ttft_ms: target of TTFT.
        tpot_ms: target of TPOT.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def problem(self) -> str | None:
        """What is wrong with the targets; None if nothing is."""
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
    """The comparison of two routes.

    Attributes:
        ttft_saved: share of the typical remote TTFT that a local turn saves (the paper's delta),
            less what it costs later turns.
        tpot_lost: share of the remote TPOT that a local turn adds.
        remote: the score of the remote route. It is 0 with weights, and with targets the
            probability to meet them.
        local: the score of the local route. It is Algorithm 1's score with weights, and with
            targets the probability to meet them.
        prefers_local: whether the local route is better.
        throughput_gained: share of the remote route's throughput that the local route adds; 0 if
            the table has no throughput.
    """

    ttft_saved: float
    tpot_lost: float
    remote: float
    local: float
    prefers_local: bool
    throughput_gained: float = 0.0


def score(
    objective: Objective,
    remote: Costs,
    local: Costs,
    typical_ttft_ms: float | None = None,
    later_ms: float = 0.0,
) -> Score:
    """Compare the costs of both routes.

    Args:
        objective: the operator's.
        remote: costs of the remote route.
        local: costs of the local route.
        typical_ttft_ms: of the remote route, by which savings of TTFT are divided; None: that of
            ``remote``. Divided by a TTFT with its queue, no saving could count more than 1.
        later_ms: TTFT that a local turn costs later turns. No target of this turn counts it.
    """
    saved_ms = remote.ttft_ms - local.ttft_ms - later_ms
    ttft_saved = saved_ms / (typical_ttft_ms or remote.ttft_ms)
    tpot_lost = (local.tpot_ms - remote.tpot_ms) / remote.tpot_ms
    gained = local.tokens_per_s / remote.tokens_per_s - 1.0 if remote.tokens_per_s else 0.0
    match objective:
        case Weights():
            points = objective.ttft * ttft_saved - objective.tpot * tpot_lost
            points += objective.throughput * gained
            return Score(ttft_saved, tpot_lost, 0.0, points, points > 0, gained)
        case Targets():
            p_remote, p_local = chance(objective, remote), chance(objective, local)
            # Where both are equally likely (both certain, both hopeless), as with equal weights.
            better = p_local > p_remote or (p_local == p_remote and ttft_saved > tpot_lost)
            return Score(ttft_saved, tpot_lost, p_remote, p_local, better, gained)
        case _:
            assert_never(objective)


def standard_error(weights: Weights, remote: Costs, local: Costs, noise: Noise) -> float:
    """The standard error of Algorithm 1's score."""
    ttft = noise.ttft * local.ttft_ms / remote.ttft_ms
    tpot = noise.tpot * local.tpot_ms / remote.tpot_ms
    rate = noise.throughput * local.tokens_per_s / remote.tokens_per_s if remote.tokens_per_s else 0
    return math.hypot(weights.ttft * ttft, weights.tpot * tpot, weights.throughput * rate)


def local_within_noise(
    objective: Objective,
    remote: Costs,
    local: Costs,
    measured: Costs,
    noise: Noise,
    typical_ttft_ms: float | None = None,
    later_ms: float = 0.0,
) -> bool:
    """Whether local would be preferred if its measured costs were one standard error better.

    This is the one-standard-error rule: the simpler model is chosen unless another one is better
    by more than that (Breiman et al., Classification and Regression Trees, 1984). The local route
    is the simpler one, because it moves no KV.

    Args:
        objective: the operator's objective.
        remote: costs of the remote route.
        local: costs of the local route, with the corrections for the current load.
        measured: costs of the local route as measured; only these are uncertain.
        noise: the relative standard errors of the measurement.
        typical_ttft_ms: as of ``score``.
        later_ms: as of ``score``.
    """
    better = Costs(
        _lowered(local.ttft_ms, measured.ttft_ms, noise.ttft),
        _lowered(local.tpot_ms, measured.tpot_ms, noise.tpot),
        local.ttft_tail,
        local.tpot_tail,
        local.tokens_per_s * (1.0 + noise.throughput),
    )
    return score(objective, remote, better, typical_ttft_ms, later_ms).prefers_local


def _lowered(now_ms: float, measured_ms: float, noise: float) -> float:
    error = noise / (1.0 + noise)
    return now_ms - error * min(now_ms, measured_ms)


def chance(targets: Targets, costs: Costs) -> float:
    """The probability that a turn with these costs meets both targets.

    TTFT and TPOT are modelled as independent lognormal variables with the measured median and
    99th percentile.
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
