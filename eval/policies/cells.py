"""The results of all policies side by side: pure functions of ``policy-grid`` rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..summary import MIN_SUCCESS

BASE = "pd"
TTFT, TPOT, BOTH, THROUGHPUT = "ttft_p50_ms", "tpot_p50_ms", "both", "tokens_per_s"
METRICS = (
    TTFT,
    "ttft_p90_ms",
    TPOT,
    "tpot_p90_ms",
    THROUGHPUT,
    "success_rate",
    "local_share",
    BOTH,
)
MORE_IS_BETTER = frozenset({THROUGHPUT, "success_rate"})


@dataclass(frozen=True, slots=True)
class Cell:
    """One side at one point; each figure by seed.

    Attributes:
        by_seed: seed to metric to value. ``ttft``: of later turns that succeeded; ``tpot`` and
            throughput: of all turns. ``both``: the mean of TTFT and TPOT as multiples of ``pd``'s
            with the same seed.
    """

    side: str
    qps: float
    turns: int
    by_seed: dict[int, dict[str, float | None]]

    def values(self, metric: str) -> list[float]:
        """Return a metric of each seed that measured it."""
        found = (of[metric] for _, of in sorted(self.by_seed.items()))
        return [value for value in found if value is not None]

    def middle(self, metric: str) -> float | None:
        """Return the median of a metric over seeds; None if no seed measured it."""
        values = self.values(metric)
        return median(values) if values else None

    @property
    def failed(self) -> bool:
        """Whether in any run fewer turns succeeded than the paper asks of a measurement."""
        return min(self.values("success_rate")) < MIN_SUCCESS


def summarize(rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """Group rows by point, sides in the order of the file."""
    cells: dict[tuple[float, int, str], Cell] = {}
    for row in rows:
        key = (row["qps"], row["turns"], row["side"])
        cell = cells.setdefault(key, Cell(row["side"], row["qps"], row["turns"], {}))
        cell.by_seed[row["seed"]] = _figures(row)
    for (qps, turns, _), cell in cells.items():
        base = cells.get((qps, turns, BASE))
        for seed, values in cell.by_seed.items():
            values[BOTH] = _both(values, base.by_seed.get(seed) if base else None)
    return sorted(cells.values(), key=lambda cell: (cell.turns, cell.qps))


def _figures(row: Mapping[str, Any]) -> dict[str, float | None]:
    later, every = row["latencies"]["later"], row["latencies"]["all"]
    routed = [route for route, turn in _turns(row) if turn > 1 and route]
    return {
        TTFT: later["ttft_ms"] and later["ttft_ms"]["p50"],
        "ttft_p90_ms": later["ttft_ms"] and later["ttft_ms"]["p90"],
        TPOT: every["tpot_ms"] and every["tpot_ms"]["p50"],
        "tpot_p90_ms": every["tpot_ms"] and every["tpot_ms"]["p90"],
        THROUGHPUT: row["output_tokens_per_s"],
        "success_rate": row["success_rate"],
        "local_share": routed.count("local") / len(routed) if routed else None,
    }


def _turns(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(zip(row["samples"]["route"], row["samples"]["turn"], strict=True))


def _both(
    values: Mapping[str, float | None], base: Mapping[str, float | None] | None
) -> float | None:
    if base is None:
        return None
    pairs = [(values[metric], base[metric]) for metric in (TTFT, TPOT)]
    ratios = [value / other for value, other in pairs if value is not None and other]
    return sum(ratios) / 2 if len(ratios) == 2 else None


@dataclass(frozen=True, slots=True)
class Winner:
    """The best sides of one point.

    Attributes:
        sides: the best, and all that it does not beat with every seed: more than one is a tie.
    """

    qps: float
    turns: int
    metric: str
    sides: tuple[str, ...]


def winners(cells: Sequence[Cell], metric: str) -> list[Winner]:
    """Return the winners at each point; a side that failed there cannot win."""
    points = dict.fromkeys((cell.turns, cell.qps) for cell in cells)
    found = []
    for turns, qps in points:
        here = [c for c in cells if (c.turns, c.qps) == (turns, qps) and not c.failed]
        ranked = sorted(
            (c for c in here if c.middle(metric) is not None),
            key=lambda c: _rank(c.middle(metric), metric),
        )
        if ranked:
            best, *others = ranked
            tied = [c.side for c in others if not _beats(best, c, metric)]
            found.append(Winner(qps, turns, metric, (best.side, *tied)))
    return found


def _rank(value: float | None, metric: str) -> float:
    assert value is not None
    return -value if metric in MORE_IS_BETTER else value


def _beats(best: Cell, other: Cell, metric: str) -> bool:
    """With every seed that both have: as many comparisons as seeds, all of one sign."""
    seeds = best.by_seed.keys() & other.by_seed.keys()
    pairs = [(best.by_seed[seed][metric], other.by_seed[seed][metric]) for seed in seeds]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(_rank(a, metric) < _rank(b, metric) for a, b in known)


_LINE = "{:>5} {:>5} {:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>6}"


def as_text(cells: Sequence[Cell]) -> str:
    """Format the cells as a table."""
    head = ("turns", "QPS", "policy", "T2+ TTFT", "p90", "TPOT", "p90", "tokens/s", "success")
    lines = [_LINE.format(*head, "local", "both")]
    for cell in cells:
        values = [cell.middle(metric) for metric in METRICS]
        fields = ["-" if value is None else f"{value:.3g}" for value in values]
        lines.append(_LINE.format(cell.turns, f"{cell.qps:g}", cell.side, *fields))
    return "\n".join(lines)
