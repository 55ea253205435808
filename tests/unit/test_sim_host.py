"""KV that the device evicts and the host keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from eval.cli import main
from eval.profiles.profile import load_profile
from eval.simulation.cache import HostMemory, KvCache
from eval.simulation.clock import Clock
from eval.simulation.cost_model import VLLM_H100, CostModel, Extend
from eval.simulation.engine import Engine, Job
from eval.simulation.lockstep import Lockstep
from eval.simulation.profile_costs import ProfileCosts
from eval.simulation.study import study

from .test_sim_study import COSTS, traffic


def served(cache: KvCache, session: int, tokens: int) -> None:
    cache.take(session, tokens)
    cache.give(session, tokens, tokens)


def test_what_is_evicted_is_copied_back() -> None:
    cache = KvCache(100, host_tokens=150)
    served(cache, 1, 60)
    served(cache, 2, 60)  # 20 tokens of the first one go
    assert (cache.cached_tokens(1), cache.host_tokens(1)) == (40, 60)
    found = cache.take(1, 70)
    assert (found, cache.restorable(1, found, 70)) == (40, 20), "the last 10 are new"
    assert cache.restorable(1, found, 50) == 10, "a shorter prompt"
    assert cache.restorable(1, 60, 70) == 0
    assert cache.restorable(3, 0, 70) == 0


def test_a_full_host_drops_what_was_used_longest_ago() -> None:
    cache = KvCache(100, host_tokens=200)
    for session in (1, 2, 3):
        served(cache, session, 80)
    assert [cache.host_tokens(session) for session in (1, 2, 3)] == [80, 80, 0]
    served(cache, 1, 80)
    assert [cache.host_tokens(session) for session in (1, 2, 3)] == [80, 0, 80]


def test_a_request_does_not_push_its_own_kv_off_the_host() -> None:
    cache = KvCache(100, host_tokens=60)
    for session in (1, 2):
        served(cache, session, 60)
    assert (cache.host_tokens(1), cache.host_tokens(2)) == (60, 0)
    cache.take(1, 100)
    assert cache.host_tokens(1) == 60


def test_what_is_larger_than_the_host_pushes_nothing_off() -> None:
    cache = KvCache(100, host_tokens=50)
    for session, tokens in ((1, 20), (2, 80), (3, 100)):
        served(cache, session, tokens)
    assert [cache.host_tokens(session) for session in (1, 2, 3)] == [20, 0, 0]


@pytest.mark.parametrize("evicted", [False, True])
def test_what_comes_back_waits_for_a_step_as_all_appends_do(evicted: bool) -> None:
    """With overlap a step has been launched already when it comes."""
    clock, costs = Clock(), ProfileCosts(load_profile("llama-3.1-8b-h100-tp1"), 100.0)
    engine = Engine(costs, Lockstep(clock.at), 8192, None, HostMemory(10**6, 1e-9))
    engine.cache.capacity_tokens = 20_000
    served(engine.cache, 1, 4000)
    if evicted:
        served(engine.cache, 2, 20_000)
    assert engine.cache.host_tokens(1) == (4000 if evicted else 0)
    engine.submit(Job(3, 1000, 500, has_kv=True, done=lambda _: None), 0.0)
    came_ms: list[float] = []
    append = Job(1, 4100, 10, has_kv=False, done=lambda _: None, first=came_ms.append)
    clock.at(50.0, partial(engine.submit, append))
    clock.run()
    step_ms = costs.decode_ms(1, 1, 1000)
    own_ms = costs.step_ms(1, 1008, [Extend(100, 4000)])
    assert append.cached_tokens == 4000
    assert step_ms < came_ms[0] - 50.0 - own_ms < 2 * step_ms


def test_without_a_host_it_is_lost() -> None:
    cache = KvCache(100)
    for session in (1, 2):
        served(cache, session, 80)
    assert cache.host_tokens(1) == cache.restorable(1, 0, 80) == 0


def test_a_reply_that_is_left_out_is_on_no_host() -> None:
    cache = KvCache(100, host_tokens=1000)
    served(cache, 1, 60)
    served(cache, 2, 100)
    assert cache.host_tokens(1) == 60
    cache.cut(1, 50)
    assert cache.host_tokens(1) == 50


def test_later_turns_find_on_the_host_what_the_device_lost() -> None:
    """And the sooner the faster it is copied; computing it again takes longest."""
    kept = 12_000 * 131_072 + 16.06e9 + VLLM_H100.activation_bytes
    small = CostModel(COSTS.model, replace(COSTS.gpu, memory_bytes=kept / 0.85), VLLM_H100)

    def late(host: HostMemory | None) -> tuple[float, float]:
        row = study(small, "1P_1pD", "full", traffic(1.0, 300.0), 0, host=host)
        return row.lost_share, row.t2_ttft_p50_ms

    nothing, fast, slow, little = (
        late(None),
        late(HostMemory(10**7, 0.001)),
        late(HostMemory(10**7, 0.05)),
        late(HostMemory(1000, 0.001)),
    )
    assert nothing[0] > 0.8
    assert fast[0] == slow[0] < 0.05
    assert fast[1] < slow[1] < nothing[1]
    assert little[0] > 0.8


def test_options_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["simulate", "cluster", "--shapes", "1P_1pD", "--workloads", "paper", "--qps", "1"]
    asked += ["--duration-s", "5", "--host-gb", "64", "--out", f"{out}"]
    with pytest.raises(SystemExit, match="--host-gb takes a --profile"):
        main(asked)
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--profile", "llama-3.1-8b-h100-tp1"])
    assert not ended.value.code, ended.value
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (row["host_gb"], row["host_gbps"]) == (64.0, 400.0)
