"""Shared prefixes in simulated caches, and the placement of new conversations that have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.cli import main
from eval.fake_worker.prefixes import PrefixCache
from eval.simulation.cache import KvCache, SharedPrefix
from eval.simulation.cost_model import paper_model
from eval.simulation.placement_study import PlacementRow, Trace, measure
from eval.simulation.workers import PlacementRule

PROMPT = SharedPrefix(1, 100)


def test_a_shared_prefix_is_found_by_other_conversations() -> None:
    cache = KvCache(1000)
    assert cache.take(1, 150, PROMPT) == 0
    assert cache.cached_tokens(2, PROMPT) == 0, "it is there when the first request has ended"
    cache.give(1, 150, 150, PROMPT)
    assert cache.cached_tokens(1, PROMPT) == 150
    assert cache.cached_tokens(2, PROMPT) == 100
    assert cache.cached_tokens(2) == cache.cached_tokens(2, SharedPrefix(2, 100)) == 0
    assert cache.take(2, 120, PROMPT) == 100
    cache.give(2, 120, 120, PROMPT)


def test_a_shared_prefix_in_use_is_evicted_last() -> None:
    cache = KvCache(400)
    for session in range(1, 6):
        cache.take(session, 150, PROMPT)
        cache.give(session, 150, 150, PROMPT)
        assert cache.cached_tokens(99, PROMPT) == 100
    assert cache.cached_tokens(1) == 0


def test_a_fake_workers_cache_finds_prefixes_of_whole_blocks() -> None:
    cache = PrefixCache(capacity_tokens=1000)
    assert cache.take(b"s" * 2048 + b"a" * 100) == 0
    assert cache.take(b"s" * 2048 + b"b" * 100) == 512
    assert cache.take(b"x" + b"s" * 2048) == 0
    assert cache.take(b"t" * 4000) == 0
    assert cache.take(b"s" * 2048) < 512, "the oldest blocks are evicted"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[PlacementRule, int], PlacementRow]:
    """Both rules under the same traffic, with 8k system prompts and without."""
    made = {}
    for shared_tokens in (8192, 0):
        trace = Trace(qps=12.0, duration_s=40.0, prompts=16, shared_tokens=shared_tokens)
        for rule in (PlacementRule.ROUTER_HASH, PlacementRule.ROUTER_LOAD):
            made[rule, shared_tokens] = measure(paper_model(), "4P_8pD", trace, rule, seed=0)
    return made


def test_shared_system_prompts_are_found_more_often_by_load(
    rows: dict[tuple[PlacementRule, int], PlacementRow],
) -> None:
    by_hash, by_load = rows[PlacementRule.ROUTER_HASH, 8192], rows[PlacementRule.ROUTER_LOAD, 8192]
    assert by_load.conversations == by_hash.conversations > 300
    assert by_load.failed_turns == by_hash.failed_turns == 0
    assert 1 - by_load.cached_share < 0.6 * (1 - by_hash.cached_share)
    assert by_load.t1_ttft_p99_ms < by_hash.t1_ttft_p99_ms
    assert by_load.moved_tokens_per_turn < 0.7 * by_hash.moved_tokens_per_turn
    assert by_load.prefill_balance < 1.5, "no herd"
    assert by_load.decode_balance < 1.2


def test_without_shared_prompts_the_rules_are_alike(
    rows: dict[tuple[PlacementRule, int], PlacementRow],
) -> None:
    by_hash, by_load = rows[PlacementRule.ROUTER_HASH, 0], rows[PlacementRule.ROUTER_LOAD, 0]
    assert by_hash.cached_share == by_load.cached_share == 0
    assert by_load.t1_ttft_p99_ms < 1.05 * by_hash.t1_ttft_p99_ms
    assert by_load.prefill_balance < 1.2


def test_the_command_prints_one_json_line_and_appends_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--duration-s", "5", "--prompts", "2", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "placement", *options])
    assert not ended.value.code
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["rule"] for row in summary["rows"]] == ["router-hash", "router-load"] * 2
    assert [row["cached_share"] for row in written] == [r["cached_share"] for r in summary["rows"]]
    assert {"commit", "hardware", "seed"} <= written[0].keys()
