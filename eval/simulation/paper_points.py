"""Single points that the PPD paper's authors measured, for calibration and for prediction.

From freelulul/vllm-ppd at eae8a1d0697d, ``ppd/results/comprehensive/CONFIGURATION/
CONFIGURATION_WORKLOAD_QPS.json`` (4 x H100, Llama-3.1-8B, vLLM). Which ones are for calibration was
chosen before anything was simulated: points at rest, and decode batches of known size.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.errors import ConfigError

from .cost_model import H100, LLAMA_8B, CostModel, Serving
from .fit import fit
from .paper_grid import Harness, Point, PointRow, measure
from .traffic import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured value; ``metric`` is a field of ``PointRow``, or of an emulated run."""

    configuration: str
    workload: str
    qps: float
    metric: str
    value: float


CALIBRATION = (
    Measured("4R", "small_small_bal", 1, "t1_ttft_p50_ms", 28.1),
    Measured("4R", "small_small_bal", 1, "t1_tpot_p50_ms", 7.84),
    Measured("4R", "large_big_paste", 0.5, "t1_ttft_p50_ms", 57.6),
    Measured("2P_2D", "small_small_bal", 1, "t1_ttft_p50_ms", 100.9),
    Measured("2P_2D", "large_small_bal", 1, "t1_ttft_p50_ms", 141.1),
    Measured("2P_2D", "small_very_long_gen", 20, "tpot_ms", 10.20),
    Measured("3P_1D", "small_very_long_gen", 20, "tpot_ms", 12.45),
    Measured("2P_2D", "large_very_long_gen", 20, "tpot_ms", 11.92),
)
PREDICTED = (
    Measured("4R", "small_small_bal", 1, "t2_ttft_p50_ms", 28.3),
    Measured("4R", "large_big_paste", 0.5, "t2_ttft_p50_ms", 77.0),
    Measured("4R", "small_huge_paste", 8, "t2_ttft_p50_ms", 60.7),
    Measured("4R", "small_huge_paste", 8, "t2_ttft_ms", 80.2),
    Measured("4R", "small_huge_paste", 8, "tpot_ms", 9.10),
    Measured("4R", "large_very_long_gen", 20, "t1_ttft_ms", 31161.0),
    Measured("4R", "large_very_long_gen", 20, "t2_ttft_ms", 90.9),
    Measured("4R", "large_very_long_gen", 20, "tpot_ms", 11.26),
    Measured("4R", "large_very_long_gen", 20, "tokens_per_s", 3772.8),
    Measured("1P_3D", "large_small_bal", 1, "t2_ttft_p50_ms", 135.6),
    Measured("1P_3D", "small_small_bal", 8, "t2_ttft_p50_ms", 97.7),
    Measured("1P_3D", "small_small_bal", 8, "t2_ttft_ms", 126.5),
    Measured("1P_3D", "small_small_bal", 8, "tpot_ms", 8.52),
    Measured("1P_3pD", "large_huge_paste", 16, "t2_ttft_p50_ms", 136.1),
    Measured("1P_3pD", "large_huge_paste", 16, "tpot_ms", 10.80),
    Measured("1P_3pD", "large_huge_paste", 16, "tokens_per_s", 3617.6),
    Measured("1P_1D_2pD", "large_big_paste", 10, "t2_ttft_p50_ms", 131.2),
    Measured("1P_1D_2pD", "large_big_paste", 10, "tpot_ms", 10.22),
    Measured("1P_1D_2pD", "large_big_paste", 10, "tokens_per_s", 3511.5),
    Measured("2P_2D", "small_small_bal", 1, "t2_ttft_p50_ms", 102.0),
    Measured("2P_2D", "large_small_bal", 1, "t2_ttft_p50_ms", 151.5),
    Measured("2P_2D", "large_long_gen", 1, "t2_ttft_p50_ms", 140.9),
    Measured("2P_2D", "large_big_paste", 4, "t2_ttft_ms", 159.5),
    Measured("2P_2D", "large_big_paste", 4, "tpot_ms", 9.06),
    Measured("2P_2D", "large_huge_paste", 8, "t2_ttft_ms", 215.0),
    Measured("2P_2D", "large_huge_paste", 8, "tpot_ms", 10.94),
    Measured("2P_2D", "large_huge_paste", 8, "tokens_per_s", 3138.6),
    Measured("2P_2D", "large_very_long_gen", 20, "t2_ttft_ms", 180.9),
    Measured("2P_2D", "large_very_long_gen", 20, "tokens_per_s", 3902.6),
    Measured("2P_2pD", "small_small_bal", 1, "t2_ttft_p50_ms", 32.0),
    Measured("2P_2pD", "large_big_paste", 4, "t2_ttft_ms", 108.7),
    Measured("2P_2pD", "large_big_paste", 4, "tpot_ms", 10.07),
    Measured("2P_2pD", "large_long_gen", 8, "t2_ttft_ms", 88.7),
    Measured("2P_2pD", "large_long_gen", 8, "tpot_ms", 11.19),
    Measured("2P_2pD", "large_long_gen", 8, "tokens_per_s", 3235.6),
    Measured("2P_2pD", "large_very_long_gen", 20, "t2_ttft_ms", 109.4),
    Measured("2P_2pD", "large_very_long_gen", 20, "tpot_ms", 11.78),
    Measured("2P_2pD", "large_very_long_gen", 20, "tokens_per_s", 4050.1),
    Measured("3P_1D", "large_long_gen", 2, "t2_ttft_p50_ms", 173.9),
    Measured("3P_1D", "large_long_gen", 2, "tpot_ms", 10.53),
    Measured("3P_1pD", "large_huge_paste", 16, "t2_ttft_p50_ms", 153.6),
    Measured("3P_1pD", "large_huge_paste", 16, "tpot_ms", 17.73),
    Measured("3P_1pD", "large_huge_paste", 16, "tokens_per_s", 2892.3),
)
# Of the same source, what is emulated, too. With 1P_3D and 3P_1D all its requests failed there.
EMULATED = (
    Measured("4R", "large_big_paste", 4, "t1_ttft_p50_ms", 66.3),
    Measured("4R", "large_big_paste", 4, "t2_ttft_p50_ms", 82.5),
    Measured("4R", "large_big_paste", 4, "tpot_p50_ms", 9.11),
    Measured("2P_2D", "large_big_paste", 4, "t1_ttft_p50_ms", 138.0),
    Measured("2P_2D", "large_big_paste", 4, "t2_ttft_p50_ms", 157.0),
    Measured("2P_2D", "large_big_paste", 4, "tpot_p50_ms", 9.21),
    Measured("2P_2pD", "large_big_paste", 4, "t1_ttft_p50_ms", 132.0),
    Measured("2P_2pD", "large_big_paste", 4, "t2_ttft_p50_ms", 90.1),
    Measured("2P_2pD", "large_big_paste", 4, "tpot_p50_ms", 10.04),
    Measured("1P_3pD", "large_big_paste", 4, "t1_ttft_p50_ms", 143.8),
    Measured("1P_3pD", "large_big_paste", 4, "t2_ttft_p50_ms", 86.8),
    Measured("1P_3pD", "large_big_paste", 4, "tpot_p50_ms", 9.70),
    Measured("3P_1pD", "large_big_paste", 4, "t1_ttft_p50_ms", 156.2),
    Measured("3P_1pD", "large_big_paste", 4, "t2_ttft_p50_ms", 98.6),
    Measured("3P_1pD", "large_big_paste", 4, "tpot_p50_ms", 12.40),
)
_SEEDS = range(5)  # their arrivals are not known: the mean over several of ours

_FREE = (
    "compute_share",
    "memory_share",
    "step_ms",
    "sequence_ms",
    "request_ms",
    "handover_ms",
    "link_bytes_per_s",
)


def simulated(
    points: Sequence[Measured],
    workloads: Sequence[Workload],
    costs: CostModel,
    harness: Harness,
) -> list[float]:
    """Simulate measured points.

    Raises:
        ConfigError: a workload of theirs is not among ``workloads``, or no turn of a point ended
            in the simulated time.
    """
    by_name = {workload.name: workload for workload in workloads}
    if missing := {point.workload for point in points} - set(by_name):
        raise ConfigError(f"workloads lack {', '.join(sorted(missing))}")
    rows: dict[tuple[str, str, float], list[PointRow]] = {}
    for point in points:
        key = point.configuration, point.workload, point.qps
        if key not in rows:
            one = by_name[point.workload]
            rows[key] = [
                measure(Point(point.configuration, one, point.qps, seed), harness, costs)
                for seed in _SEEDS
            ]
    return [_mean(point, rows[point.configuration, point.workload, point.qps]) for point in points]


def _mean(point: Measured, rows: Sequence[PointRow]) -> float:
    values = [value for row in rows if (value := getattr(row, point.metric)) is not None]
    if not values:
        raise ConfigError(
            f"no turn of {point.configuration} {point.workload} at QPS {point.qps:g} ended in the "
            "simulated time; give a longer --duration-s"
        )
    return statistics.fmean(values)


def calibrate(start: Serving, workloads: Sequence[Workload]) -> Serving:
    """Fit ``CALIBRATION``."""

    def errors(serving: Serving) -> list[float]:
        costs = CostModel(LLAMA_8B, H100, serving)
        values = simulated(CALIBRATION, workloads, costs, Harness())
        return [value / point.value - 1 for value, point in zip(values, CALIBRATION, strict=True)]

    return fit(start, _FREE, errors)
