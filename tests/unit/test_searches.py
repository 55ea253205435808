"""Where vector search runs: searches between the steps of workers, and in a pool."""

from __future__ import annotations

import statistics

import pytest

from eval import cli
from eval.profiles.profile import load_profile
from eval.simulation.clock import Clock
from eval.simulation.engine import Engine, Job
from eval.simulation.lockstep import Lockstep
from eval.simulation.profile_costs import ProfileCosts
from eval.simulation.search_placement import workers_of
from eval.simulation.searches import (
    Architecture,
    Index,
    Measured,
    SearchCost,
    SearchSimulation,
    Turns,
)
from ppd.errors import ConfigError

PROFILE = load_profile("llama-3.1-8b-h100-tp1")
COSTS = ProfileCosts(PROFILE, 100.0)
INDEX, COST = Index(), SearchCost()
ALONE_MS = COST.expansions * COST.hop_ms


def simulate(where: Architecture, rate: float, index: Index = INDEX) -> Measured:
    turns = Turns(rate * 4, seconds=5.0)
    simulation = SearchSimulation(
        where, workers_of(where, 4), turns, PROFILE, 100.0, 3.35e12, index=index, cost=COST
    )
    return simulation.run(seed=0)


def test_a_search_waits_for_the_step_that_runs_and_searches_run_side_by_side() -> None:
    clock = Clock()
    engine = Engine(COSTS, Lockstep(clock.at), 8192, None)
    engine.submit(Job(1, 1000, 50, True, lambda _: None), 0.0)
    step_ms = COSTS.step_ms(1, 1000, [])
    ended: list[float] = []
    for share in (0.2, 0.4):
        clock.at(share * step_ms, lambda now_ms: engine.search(2.0, ended.append, now_ms))
    clock.run()
    assert ended == pytest.approx([step_ms + 2.0] * 2, rel=0.01)


def test_an_idle_worker_searches_at_once() -> None:
    clock = Clock()
    engine = Engine(COSTS, Lockstep(clock.at), 8192, None)
    ended: list[float] = []
    clock.at(10.0, lambda now_ms: engine.search(2.0, ended.append, now_ms))
    clock.run()
    assert ended == [12.0]
    assert engine.busy_ms == 2.0


@pytest.mark.parametrize("where", Architecture)
def test_every_turn_ends_and_searches_as_often_as_it_must(where: Architecture) -> None:
    found = simulate(where, 2.0)
    turns = len(found.tpot_ms)
    assert 25 <= turns <= 60
    assert len(found.ttft_ms) == len(found.prefill_search_ms) == turns
    assert len(found.decode_search_ms) == 3 * turns  # after 64, 128 and 192 of 256 tokens
    least_ms = ALONE_MS if where is not Architecture.POOL else ALONE_MS + COST.round_trip_ms
    assert min(found.prefill_search_ms) == pytest.approx(least_ms)


def test_decode_searches_wait_for_steps_unless_there_is_a_pool() -> None:
    coupled, pool = simulate(Architecture.COUPLED, 6.0), simulate(Architecture.POOL, 6.0)
    waited = statistics.median(coupled.decode_search_ms)
    assert waited > ALONE_MS + 0.3 * COSTS.step_ms(1, 2048, [])
    assert statistics.median(pool.decode_search_ms) < 2 * (ALONE_MS + COST.round_trip_ms)
    # Of four workers the pool has taken one of the two that decode.
    assert statistics.median(pool.tpot_ms) > statistics.median(coupled.tpot_ms)


def test_the_index_takes_kv_where_it_is() -> None:
    coupled, prefill = simulate(Architecture.COUPLED, 1.0), simulate(Architecture.PREFILL, 1.0)
    taken = (prefill.kv_tokens - coupled.kv_tokens) * PROFILE.kv_bytes_per_token
    assert taken == pytest.approx(INDEX.bytes, rel=1e-4)
    with pytest.raises(ConfigError, match="leaves no KV on llama"):
        simulate(Architecture.COUPLED, 1.0, Index(rows=1e9))


def test_the_command_prints_rates_that_are_kept_up(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "search-placement", "--profile", "llama-3.1-8b-h100-tp1"]
    small = ["--workers", "4", "--rates", "1", "1000", "--seconds", "2"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, *small])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["coupled", "prefill", "pool"]
    with pytest.raises(SystemExit, match="even numbers"):
        cli.main([*argv, "--workers", "5"])
