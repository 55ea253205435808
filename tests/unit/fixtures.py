"""Features and decision tables for tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from hypothesis import strategies as st

from ppd.decision import Features, HomeState
from ppd.score import Targets, Weights
from ppd.table import Table
from ppd.table_file import (
    VERSION,
    Axes,
    Bin,
    CellRecord,
    Measured,
    Provenance,
    Statistic,
    TableRecord,
)
from ppd.table_policy import Correction

FEATURES = Features(
    session="s",
    turn=2,
    context_tokens=1000,
    earlier_prompt_tokens=900,
    new_tokens=20,
    output_tokens=50,
    prefill_cached_tokens=900,
    prefill_queue_tokens=0,
    qps=1.0,
    home=HomeState.READY,
    page_size=16,
    home_running=0,
    home_append_tokens=0,
    home_free_tokens=None,
)

# (context bin, new bin, output bin, QPS bin) -> TTFT and TPOT remote, TTFT and TPOT local, in ms
CostsOf = Callable[[int, int, int, int], tuple[float, float, float, float]]

AXES = Axes(
    context_tokens=(Bin(0, 2048, 1000), Bin(2048, 131072, 8000)),
    new_tokens=(Bin(0, 256, 64), Bin(256, 16384, 1024)),
    output_tokens=(Bin(0, 8192, 128),),
    qps=(Bin(0, 2, 1), Bin(2, 10_000, 4)),
)


def statistic(median: float, spread: float = 0.001) -> Statistic:
    """``spread`` as a share of the median."""
    return Statistic(median=median, p99=median * 2.0, n=30, spread=spread * median)


def table_record(
    costs_of: CostsOf,
    *,
    model: str = "fake",
    axes: Axes = AXES,
    running: float = 2.0,
    spread: float = 0.001,
    sweep: dict[str, Any] | None = None,
    rates: tuple[float, float] | None = None,
) -> TableRecord:
    """``rates``: throughput of the remote and of the local route, with all seeds in all cells."""
    remote_rates, local_rates = ((rate,) * 3 for rate in rates) if rates else ((), ())
    cells = []
    for bins in product(*(range(len(bins)) for _, bins in axes.each())):
        place = (bins[0], bins[1], bins[2], bins[3])
        t0, p0, t1, p1 = costs_of(*place)
        cells.append(
            CellRecord(
                bins=place,
                remote=Measured(
                    statistic(t0, spread), statistic(p0, spread), t0, running, 1.0, remote_rates
                ),
                local=Measured(
                    statistic(t1, spread), statistic(p1, spread), t1, running, 1.0, local_rates
                ),
                seeds=(0, 1, 2),
            )
        )
    return TableRecord(
        version=VERSION,
        model=model,
        shape="1P1D",
        provenance=Provenance("a machine", "sglang 0", "0", "abc", "2026-01-01", sweep or {}),
        prefill_ms_per_token=0.1,
        append_ms_per_token=0.2,
        axes=axes,
        cells=tuple(cells),
    )


def costs_of(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    """Local wins for short inputs, remote for long ones; more so under load."""
    loss = 1.0 + (0.1, 0.8)[n] * (1 + q)
    return (100.0 + 100 * c, 10.0, 50.0 + 60 * n, 10.0 * loss)


TABLE = Table(table_record(costs_of))

any_features = st.builds(
    Features,
    session=st.text(max_size=4),
    turn=st.integers(2, 50),
    context_tokens=st.integers(0, 300_000),
    earlier_prompt_tokens=st.integers(0, 300_000),
    new_tokens=st.integers(1, 40_000),
    output_tokens=st.integers(1, 20_000),
    prefill_cached_tokens=st.integers(0, 300_000),
    prefill_queue_tokens=st.integers(0, 10**6),
    qps=st.floats(0, 100),
    home=st.sampled_from(HomeState),
    page_size=st.sampled_from([1, 16, 64]),
    home_running=st.integers(0, 500),
    home_append_tokens=st.integers(0, 50_000),
    home_free_tokens=st.none() | st.integers(0, 10**6),
)
any_corrections = st.frozensets(st.sampled_from(Correction))
any_weights = st.builds(Weights, st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
any_objectives = any_weights | st.builds(Targets, st.floats(0.1, 1e6), st.floats(0.1, 1e6))
