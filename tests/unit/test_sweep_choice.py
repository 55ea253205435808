"""What a sweep measures next, and what it may leave out."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from eval.sweep.choice import Adaptive, Grid, Job
from eval.sweep.config import Place, Run, SweepConfig, load_config
from ppd.errors import ConfigError

TOML = """
shape = "1P1D"
turns = 3
conversations = 2
quiet_conversations = 1
think_s = 0.5
seeds = [0, 1, 2]
{adaptive}
[axes]
context_tokens = [
  {{ low = 0, high = 2048, at = 1000 }},
  {{ low = 2048, high = 8192, at = 4000 }},
  {{ low = 8192, high = 32768, at = 16000 }},
]
new_tokens = [
  {{ low = 0, high = 64, at = 32 }},
  {{ low = 64, high = 192, at = 128 }},
  {{ low = 192, high = 2048, at = 512 }},
]
output_tokens = [{{ low = 0, high = 64, at = 16 }}, {{ low = 64, high = 1024, at = 128 }}]
qps = [
  {{ low = 0, high = 1.5, at = 1 }},
  {{ low = 1.5, high = 3, at = 2 }},
  {{ low = 3, high = 9, at = 4 }},
]
"""
Costs = tuple[float, float]


def config_of(folder: Path, adaptive: str) -> SweepConfig:
    path = folder / "sweep.toml"
    path.write_text(TOML.format(adaptive=adaptive))
    return load_config(path)


def costs(run: Run, noise: float) -> Costs:
    """A world in which large inputs go remote, small ones local, whatever else."""
    context, new, _ = run.place.workload
    qps = -1 if run.place.qps is None else run.place.qps
    ttft_ms, tpot_ms = 20.0 * 1.5**context * 2.0**new * 1.3**qps, 4.0 * 1.1**qps
    if run.policy == "full":
        ttft_ms, tpot_ms = 0.5 * ttft_ms, tpot_ms * (1.05, 1.2, 2.2)[new]
    drawn = random.Random(str(run))
    return tuple(one * math.exp(drawn.gauss(0.0, noise)) for one in (ttft_ms, tpot_ms))  # type: ignore[return-value]


def measure_all(config: SweepConfig, noise: float) -> tuple[list[Job], dict[Run, Costs | None]]:
    choice = Grid(config) if config.adaptive is None else Adaptive(config)
    jobs: list[Job] = []
    medians: dict[Run, Costs | None] = {}
    while (job := choice.next(medians, ())) is not None:
        assert job not in jobs
        jobs.append(job)
        medians |= {run: costs(run, noise) for run in job.runs(config.policies)}
    return jobs, medians


def test_a_grid_is_measured_whole_and_seed_by_seed(tmp_path: Path) -> None:
    config = config_of(tmp_path, "")
    jobs, medians = measure_all(config, 0.05)
    assert len(jobs) == 3 * 18 * 4
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert len(medians) == 2 * len(jobs)
    assert Grid(config).left(medians) == 0


def test_where_noise_decides_more_seeds_are_measured(tmp_path: Path) -> None:
    config = config_of(tmp_path, "more_seeds = [7, 8]")
    jobs, medians = measure_all(config, 0.3)
    further = jobs[3 * 18 * 4 :]
    assert {job.seed for job in further} == {7, 8}
    assert 0 < len(further) < 2 * 54
    for job in further:
        if job.seed == 8:
            assert Job(job.place, 7) in further
    assert Grid(config).left(medians) == 0
    assert len(measure_all(config, 0.001)[0]) == 3 * 18 * 4


@pytest.mark.parametrize("more", ["more_seeds = [2, 3]", "more_seeds = [3]\n[adaptive]"])
def test_more_seeds_are_others_and_of_a_grid(tmp_path: Path, more: str) -> None:
    with pytest.raises(ConfigError, match="more_seeds must be others than seeds"):
        config_of(tmp_path, more)


def test_decisions_cost_a_fraction_of_the_grid(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[adaptive]\nstart = 0.2")
    jobs, medians = measure_all(config, 0.03)
    loaded = [job for job in jobs if job.place.qps is not None]
    assert len(loaded) < 0.35 * 3 * 54
    assert {job.place.workload for job in loaded} <= {
        job.place.workload for job in jobs if job.place.qps is None
    }
    assert (Adaptive(config).chance_of_wrong(medians) <= 0.05).all()


def test_seeds_go_where_the_noise_is(tmp_path: Path) -> None:
    """With so much noise one seed settles nothing near the boundary."""
    quiet = measure_all(config_of(tmp_path, "[adaptive]\nstart = 0.2"), 0.01)[0]
    noisy = measure_all(config_of(tmp_path, "[adaptive]\nstart = 0.2"), 0.25)[0]
    assert sum(job.seed > 0 for job in noisy) > sum(job.seed > 0 for job in quiet)


def test_it_stops_at_what_may_be_used(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[adaptive]\nstart = 0.1\nmost = 0.1\nwrong = 0.001")
    jobs, medians = measure_all(config, 0.4)
    assert sum(job.place.qps is not None for job in jobs) == int(0.1 * 3 * 54)
    assert Adaptive(config).left(medians) == 0


@pytest.mark.parametrize("adaptive", ["", "[adaptive]\nstart = 0.2"])
def test_what_others_are_at_is_not_given_twice(tmp_path: Path, adaptive: str) -> None:
    config = config_of(tmp_path, adaptive)
    choice = Adaptive(config) if adaptive else Grid(config)
    busy: list[Job] = []
    for _ in range(6):
        job = choice.next({}, busy)
        assert job is not None
        assert job not in busy
        busy.append(job)


def test_a_cell_without_an_answer_is_not_asked_for_ever(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[adaptive]\nstart = 0.2")
    choice = Adaptive(config)
    medians: dict[Run, Costs | None] = {}
    jobs = 0
    while (job := choice.next(medians, ())) is not None:
        medians |= dict.fromkeys(job.runs(config.policies))
        jobs += 1
    assert jobs <= 18 + 3 * 54


def test_policies_take_turns_at_being_first() -> None:
    first = [Job(Place((0, 0, 0), 0), seed).runs(("pd", "full"))[0].policy for seed in range(4)]
    assert first == ["pd", "full", "pd", "full"]
