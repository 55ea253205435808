"""Where vector search runs: the formulas hold together."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eval.simulation import search_command
from eval.simulation.cost_model import paper_model
from eval.simulation.search_placement import (
    Architecture,
    Index,
    Outcome,
    SearchCost,
    Traffic,
    outcome,
)
from ppd.errors import ConfigError

COSTS, SEARCH, INDEX = paper_model(), SearchCost(), Index(10e6, 768)


def at(where: Architecture, turns_per_s: float, index: Index = INDEX) -> Outcome | None:
    gpus = search_command.shapes(64)[where]
    return outcome(where, gpus, Traffic(turns_per_s), COSTS, index, SEARCH)


def test_as_many_as_fill_the_memory_take_no_longer_than_one() -> None:
    full = SEARCH.saturation(INDEX, COSTS.gpu)
    assert SEARCH.utilisation(full, INDEX, COSTS.gpu) == pytest.approx(1.0)
    assert SEARCH.utilisation(full / 4, INDEX, COSTS.gpu) == pytest.approx(0.25)
    through = full / SEARCH.alone_ms * 1e3
    assert through == pytest.approx(SEARCH.max_per_s(INDEX, COSTS.gpu))


@pytest.mark.parametrize("where", Architecture)
def test_more_load_is_never_faster_and_in_the_end_too_much(where: Architecture) -> None:
    found = [at(where, rate) for rate in range(16, 1000, 16)]
    served = [one for one in found if one is not None]
    assert found[: len(served)] == served  # once too much, always too much
    assert len(served) < len(found)
    for name in ("ttft_ms", "tpot_ms", "prefill_use", "decode_use"):
        values = [getattr(one, name) for one in served]
        assert values == sorted(values)


def test_the_index_takes_room_where_it_is() -> None:
    coupled, alone = at(Architecture.COUPLED, 64), at(Architecture.POOL, 64)
    assert coupled is not None
    assert alone is not None
    taken = (alone.kv_tokens - coupled.kv_tokens) * COSTS.model.kv_bytes_per_token
    assert taken == pytest.approx(INDEX.bytes, rel=1e-4)
    assert at(Architecture.COUPLED, 64, Index(1e9, 768)) is None  # larger than the GPU


def test_a_busy_prefill_gpu_keeps_searches_waiting() -> None:
    busy, pool = at(Architecture.PREFILL, 320), at(Architecture.POOL, 320)
    assert busy is not None
    assert pool is not None
    assert busy.decode_search_ms > 5 * pool.decode_search_ms
    idle = at(Architecture.PREFILL, 8)
    assert idle is not None
    assert idle.prefill_search_ms == SEARCH.alone_ms


def test_the_command_draws_and_refuses(tmp_path: Path) -> None:
    given = {"gpus": 8, "rates": [1.0, 4.0, 40.0], "rows": 1e6, "dimensions": 384}
    plot, out = tmp_path / "placement.png", tmp_path / "rows.jsonl"
    assert search_command.run(argparse.Namespace(**given, plot=plot, out=out)) == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert len(out.read_text().splitlines()) == 6
    with pytest.raises(ConfigError, match="3 or more"):
        search_command.run(argparse.Namespace(**{**given, "gpus": 2}, plot=None, out=None))
