"""Medians of a router bench, and paired ratios of two routers in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .candidates import BASELINES

_SUMMARIZED = (
    "cpu_us_per_request",
    "cpu_us_per_local_turn",
    "cpu_us_per_long_request",
    "cpu_us_per_chunk_burst",
    "cpu_us_per_chunk_paced",
    "cpu_us_per_chunk_saturated",
    "chunks_per_s_one_core",
    "requests_per_s_one_core",
    "added_ttft_p50_ms",
    "added_ttft_p99_ms",
    "ttft_p50_ms_paced",
    "ttft_p99_ms_paced",
    "itl_p50_ms_paced",
    "itl_p99_ms_paced",
    "mb_per_1000_streams",
)
METRICS = ("cpu_us_per_request", "cpu_us_per_chunk_paced", "cpu_us_per_chunk_burst")

# Student's t at 97.5 %, for 1 to 10 degrees of freedom.
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def summarize(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return each router's medians over the rounds, and the sum of its errors."""
    summary: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(str(row["router"]) for row in rows):
        of_router = [row for row in rows if row["router"] == name]
        summary[name] = {
            value: round(statistics.median(float(str(row[value])) for row in of_router), 3)
            for value in _SUMMARIZED
            if value in of_router[0]
        }
        summary[name]["errors"] = sum(int(str(row["errors"])) for row in of_router)
    return summary


def paired(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, Any]]:
    """Compare what was measured of our routers: with the baseline checkout, and all parts on."""
    names = {row["router"] for row in rows}
    return {
        f"{ours}/{baseline}": paired_ratios(rows, ours, baseline)
        for ours, baseline in (*BASELINES.items(), ("ours_everything", "ours"))
        if ours in names and baseline in names
    }


def paired_ratios(
    rows: Sequence[dict[str, object]], ours: str, baseline: str
) -> dict[str, dict[str, Any]]:
    """Divide one router's costs by another's, round by round.

    Args:
        rows: one for each router and round.
        ours, baseline: names of the two routers.

    Returns:
        For each metric that both have: the number of ``rounds``, the ``median`` of their ratios and
        the ``interval`` (95 %, of the geometric mean; None with fewer than two rounds). A ratio
        below 1 means that ``ours`` is cheaper.
    """
    by_router = {
        name: {row["round"]: row for row in rows if row["router"] == name}
        for name in (ours, baseline)
    }
    shared = [number for number in by_router[ours] if number in by_router[baseline]]
    compared: dict[str, dict[str, Any]] = {}
    for metric in METRICS:
        found = (
            round_ratio(by_router[ours][number], by_router[baseline][number], metric)
            for number in shared
        )
        ratios = [ratio for ratio in found if ratio is not None]
        if ratios:
            interval = geometric_interval(ratios)
            compared[metric] = {
                "rounds": len(ratios),
                "median": round(statistics.median(ratios), 4),
                "interval": interval and [round(bound, 4) for bound in interval],
            }
    return compared


def round_ratio(one: Mapping[str, Any], other: Mapping[str, Any], metric: str) -> float | None:
    """Return the ratio of two routers' costs in a round; None if one has none.

    A slice of one router is measured right beside the other's, so that what else the machine does
    meets both. Slices of a round follow one another and are not independent. So their ratios
    count as one: their geometric mean.
    """
    pairs = zip(costs_of(one, metric), costs_of(other, metric), strict=True)
    logs = [math.log(cost / beside) for cost, beside in pairs]
    return math.exp(statistics.fmean(logs)) if logs else None


def geometric_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the geometric mean: Student's t over the logarithms.

    Returns:
        The lower and the upper bound, or None for fewer than two ratios.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    margin = _t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - margin), math.exp(mean + margin)


def _t_quantile(freedom: int) -> float:
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    # The first terms of the Cornish-Fisher expansion around the normal quantile.
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def costs_of(row: Mapping[str, Any], metric: str) -> list[float]:
    """Return the costs of a round's slices; of an older row the mean of the round alone."""
    slices: dict[str, list[float]] = row.get("slices", {})
    if metric in slices:
        return slices[metric]
    return [float(row[metric])] if metric in row else []
