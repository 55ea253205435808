"""KV that the device evicts and the host keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.cli import main
from eval.simulation.cache import HostMemory, KvCache
from eval.simulation.cost_model import VLLM_H100, CostModel
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
    assert (found, cache.restore(1, found, 70)) == (40, 20), "the last 10 are new"
    assert cache.restore(1, found, 50) == 10, "a shorter prompt"
    assert cache.restore(1, 60, 70) == 0
    assert cache.restore(3, 0, 70) == 0


def test_a_full_host_drops_what_was_used_longest_ago() -> None:
    cache = KvCache(100, host_tokens=200)
    for session in (1, 2, 3):
        served(cache, session, 80)
    assert [cache.host_tokens(session) for session in (1, 2, 3)] == [80, 80, 0]
    assert cache.restore(1, 0, 80) == 80
    served(cache, 4, 80)
    assert [cache.host_tokens(session) for session in (1, 2, 3)] == [80, 0, 80]


def test_without_a_host_it_is_lost() -> None:
    cache = KvCache(100)
    for session in (1, 2):
        served(cache, session, 80)
    assert cache.host_tokens(1) == cache.restore(1, 0, 80) == 0


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
