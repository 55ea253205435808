"""Numbers that the PPD paper states of 4 x H100 with Llama-3.1-8B, and the simulated ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ppd.score import Weights, score
from ppd.table import Costs

from .cost_model import CostModel
from .paper_grid import CATEGORIES, PointRow
from .paper_interference import Beside, slowdown

Grid = dict[tuple[str, str, float], PointRow]

PAIRS = {"1P3D": ("1P_3D", "1P_3pD"), "2P2D": ("2P_2D", "2P_2pD"), "3P1D": ("3P_1D", "3P_1pD")}
BANDS = {"low": (0.5, 1, 2), "medium": (4, 6, 8), "high": (12, 16, 20)}  # printed in Table 1
_TTFT = {
    "1P3D": (-57.8, -65.2, -73.3),
    "2P2D": (-47.7, -51.6, -56.2),
    "3P1D": (-44.3, -38.1, -24.9),
}
_WINNERS = {
    "4R": (63.3, 0.6, 0.0),
    "x=0": (0.0, 38.3, 4.4),
    "partial": (3.3, 33.3, 27.8),
    "x=1": (27.2, 15.6, 38.3),
    "hybrid": (6.1, 12.2, 16.1),  # in the text of its appendix
}
_BEST_DIFFER = 92.2  # share of the points whose best configurations by TTFT and by TPOT differ
_FAILURES = {
    "3P_1D": (11, 44, 61, 89),
    "3P_1pD": (6, 22, 44, 67),
    "2P_2D": (0, 6, 11, 22),
    "2P_2pD": (0, 0, 6, 11),
    "4R": (0, 0, 0, 0),
}
_FAILED_BELOW = 0.95  # share of its turns that a point must serve; from its own analysis


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that the paper states, and the same of the simulation.

    Attributes:
        paper, simulated: in the same unit, mostly percent; None: there is nothing to compare.
    """

    group: str
    name: str
    paper: float
    simulated: float | None

    @property
    def difference(self) -> float | None:
        """The simulated number less the paper's, in the same unit."""
        return None if self.simulated is None else self.simulated - self.paper


def claims(rows: Sequence[PointRow], costs: CostModel) -> list[Claim]:
    """Compute all claims from the rows of a grid."""
    grid: Grid = {(row.configuration, row.workload, row.qps): row for row in rows}
    return [
        *_ttft(grid),
        *_winners(grid),
        *_failures(grid),
        *_interference(costs),
        *_weights(grid),
        # The paper's is of WildChat, with 4.1 turns a conversation; the grid has two.
        Claim("KV moved", "x=1 against x=0, less by", 75.0, _less_moved(grid)),
    ]


def _ttft(grid: Grid) -> Iterator[Claim]:
    for shape, (remote, local) in PAIRS.items():
        for (band, rates), paper in zip(BANDS.items(), _TTFT[shape], strict=True):
            name = f"{shape} {band} QPS"
            changes = [
                100 * (b.t2_ttft_ms / a.t2_ttft_ms - 1)
                for a, b in _both(grid, remote, local)
                if a.qps in rates and a.t2_ttft_ms and b.t2_ttft_ms
            ]
            yield Claim("T2 TTFT, x=1 against x=0", name, paper, _mean(changes))
            apart = [_change_apart(grid, remote, local, qps) for qps in rates]
            known = [change for change in apart if change is not None]
            yield Claim("the same, each over what it served", name, paper, _mean(known))


def _change_apart(grid: Grid, remote: str, local: str, qps: float) -> float | None:
    """The change at one rate, where each configuration counts the workloads that it served."""
    means = []
    for name in (remote, local):
        at = (row for row in grid.values() if (row.configuration, row.qps) == (name, qps))
        served = [row.t2_ttft_ms for row in at if row.ok_share >= _FAILED_BELOW and row.t2_ttft_ms]
        if not served:
            return None
        means.append(statistics.fmean(served))
    return 100 * (means[1] / means[0] - 1)


def _winners(grid: Grid) -> Iterator[Claim]:
    best: tuple[tuple[str, Callable[[PointRow], float | None]], ...] = (
        ("TTFT", lambda row: row.t2_ttft_ms),
        ("TPOT", lambda row: row.tpot_ms),
        ("throughput", lambda row: -row.tokens_per_s),
    )
    of = {name: category for category, names in CATEGORIES.items() for name in names}
    cells = sorted({(workload, qps) for _, workload, qps in grid})
    winners: dict[str, list[str]] = {}  # of each cell that some configuration served
    for place, (metric, value_of) in enumerate(best):
        won: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        winners[metric] = []
        for workload, qps in cells:
            values = {
                name: value
                for name in of
                if (row := grid.get((name, workload, qps))) is not None
                and row.ok_share >= _FAILED_BELOW
                and (value := value_of(row)) is not None
            }
            if values:
                winners[metric].append(min(values, key=values.__getitem__))
                won[of[winners[metric][-1]]] += 1
        for category, papers in _WINNERS.items():
            share = 100 * won[category] / len(cells) if cells else None
            yield Claim(f"wins by {metric}", category, papers[place], share)
    pairs = zip(winners["TTFT"], winners["TPOT"], strict=True)
    differ = [100.0 * (one != other) for one, other in pairs]
    yield Claim("the best by TTFT and by TPOT differ", "points", _BEST_DIFFER, _mean(differ))


def _failures(grid: Grid) -> Iterator[Claim]:
    for name, papers in _FAILURES.items():
        for qps, paper in zip((8, 12, 16, 20), papers, strict=True):
            at = [row for row in grid.values() if row.configuration == name and row.qps == qps]
            failed = [100.0 * (row.ok_share < _FAILED_BELOW) for row in at]
            yield Claim("workloads that fail", f"{name} QPS {qps}", float(paper), _mean(failed))


def _interference(costs: CostModel) -> Iterator[Claim]:
    """Of the stated ranges the middle (3-4 times: +250 %) or the bound (below 25 %)."""
    stated = (
        ("1 full, batch 200", 48.0, Beside(200, 2048, 1, full=True)),
        ("1 append, batch 200", 2.0, Beside(200, 2048, 1)),
        ("4 full, batch 200", 57.0, Beside(200, 2048, 4, full=True)),
        ("4 append, batch 200", 21.0, Beside(200, 2048, 4)),
        ("1 full, batch 64 at 32k (3-4 times)", 250.0, Beside(64, 32768, 1, full=True)),
        ("1 append, batch 64 at 64k (below 25)", 25.0, Beside(64, 65536, 1)),
    )
    for shared, reading in ((False, "own contexts"), (True, "one context, read once")):
        for name, paper, beside in stated:
            simulated = 100 * slowdown(costs, beside, shared=shared)
            yield Claim(f"TPOT beside prefill, {reading}", name, paper, simulated)


def _weights(grid: Grid) -> Iterator[Claim]:
    """Algorithm 1 on what was simulated, for each shape, workload and rate."""
    for weight, paper in ((1.0, 95.0), (3.0, 50.0), (6.0, 20.0)):
        chosen: list[float] = []
        for names in PAIRS.values():
            for a, b in _both(grid, *names):
                if a.t2_ttft_ms and b.t2_ttft_ms and a.t2_tpot_ms and b.t2_tpot_ms:
                    remote = Costs(a.t2_ttft_ms, a.t2_tpot_ms, 1.0, 1.0)
                    local = Costs(b.t2_ttft_ms, b.t2_tpot_ms, 1.0, 1.0)
                    result = score(Weights(1.0, weight), remote, local)
                    chosen.append(100.0 * result.prefers_local)
        yield Claim("local turns", f"w_tpot {weight:g}", paper, _mean(chosen))


def _less_moved(grid: Grid) -> float | None:
    """Over all shapes, workloads and rates."""
    pairs = [pair for names in PAIRS.values() for pair in _both(grid, *names)]
    remote = sum(a.moved_tokens for a, _ in pairs)
    return 100 * (1 - sum(b.moved_tokens for _, b in pairs) / remote) if remote else None


def _both(grid: Grid, one: str, other: str) -> Iterator[tuple[PointRow, PointRow]]:
    for (configuration, workload, qps), row in grid.items():
        if configuration == one and (against := grid.get((other, workload, qps))) is not None:
            yield row, against


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
