"""Plans: what a workload's name and a demand make."""

from __future__ import annotations

import json
import random
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.cli import parser
from eval.traffic.conversations import (
    Conversation,
    PlannedTurn,
    at_rate,
    cut,
    poisson_starts,
    scaled,
)
from eval.traffic.kinds import PAPER, PAPER_QPS, load
from eval.traffic.workloads import Demand, plan
from ppd.errors import ConfigError

sizes = st.integers(1, 5000)
exchanges = st.builds(PlannedTurn, sizes, sizes, keep_tokens=st.none() | st.integers(0, 20_000))
conversations = st.builds(
    Conversation, st.just(0.0), st.lists(exchanges, min_size=1, max_size=8).map(tuple)
)


def sizes_of(one: Conversation) -> list[tuple[int, int]]:
    return [(turn.new_tokens, turn.output_tokens) for turn in one.turns]


def test_the_papers_workloads_are_18_of_two_turns() -> None:
    kinds = {one.label: sizes_of(one) for one in load("paper:all").kinds}
    assert list(kinds) == list(PAPER)
    assert len(kinds) == 18
    assert len(PAPER_QPS) == 10
    assert kinds["small_tiny"] == [(128, 128), (16, 32)]
    assert kinds["large_huge_paste"] == [(1024, 1024), (1024, 32)]


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    demand = Demand("turns:4?think_s=2", conversations=50, qps=5)
    assert plan(demand) == plan(demand)
    other = plan(Demand("turns:4?think_s=2", conversations=50, qps=5, seed=1))
    assert other != plan(demand)
    starts_s = [one.starts_at_s for one in other]
    assert starts_s == sorted(starts_s)
    assert 5 < starts_s[-1] < 10
    thinks_s = [turn.think_s for one in other for turn in one.turns[1:]]
    assert statistics.fmean(thinks_s) == pytest.approx(2, rel=0.4)
    assert all(one.turns[0].think_s == 0 for one in other)


@pytest.mark.parametrize("turns", [2, 4, 8, 16])
def test_turn_scaling_grows_by_its_turns(turns: int) -> None:
    one = plan(Demand(f"turns:{turns}", conversations=1, qps=1))[0]
    assert list(one.contexts()) == [256 * k for k in range(turns)]


def test_a_grid_has_every_cell_with_its_mean_context() -> None:
    found = load("grid?context=1000,4000&new=32,512&out=16&turns=4&shared=100").kinds
    assert [one.label for one in found] == [
        "1000+32>16", "1000+512>16", "4000+32>16", "4000+512>16",
    ]  # fmt: skip
    for one in found:
        _, *later = one.contexts()
        assert statistics.fmean(later) == int(one.label.partition("+")[0])
        assert one.shared_tokens == 100


@given(conversations, st.floats(0.001, 1))
def test_scaling_keeps_the_shape(one: Conversation, scale: float) -> None:
    less = scaled(one, scale)
    assert len(less.turns) == len(one.turns)
    for small, large in zip(less.turns, one.turns, strict=True):
        assert 1 <= small.new_tokens <= large.new_tokens
        assert large.new_tokens * scale <= small.new_tokens + 1e-6
        assert small.new_tokens < large.new_tokens * scale + 1
        assert small.output_tokens < large.output_tokens * scale + 1
    assert less.longest_tokens <= scale * one.longest_tokens + 2 * len(one.turns) + 1
    assert scaled(one, 1.0) == one


@given(conversations, st.integers(1, 30_000))
def test_what_is_cut_fits(one: Conversation, max_context: int) -> None:
    less = cut(one, max_context)
    if less is None:
        assert one.turns[0].new_tokens + one.turns[0].output_tokens > max_context
        return
    assert less.longest_tokens <= max_context
    assert less.turns == one.turns[: len(less.turns)]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50, unique=True), st.floats(0.01, 100))
def test_stretched_arrivals_have_the_rate_and_keep_their_order(
    starts_s: list[float], qps: float
) -> None:
    if max(starts_s) - min(starts_s) < 1e-3:
        return
    stretched = at_rate(starts_s, qps)
    assert max(stretched) == pytest.approx((len(starts_s) - 1) / qps)
    assert min(stretched) == 0
    in_order = [at_s for _, at_s in sorted(zip(starts_s, stretched, strict=True))]
    assert in_order == sorted(stretched)


def test_poisson_arrivals_fill_their_time() -> None:
    starts_s = poisson_starts(1000, 10.0, random.Random(0))
    gaps_s = [b - a for a, b in pairwise(starts_s)]
    assert 95 < starts_s[-1] < 100
    assert statistics.stdev(gaps_s) == pytest.approx(statistics.fmean(gaps_s), rel=0.15)


def write_sessions(path: Path, starts_s: list[float]) -> Path:
    rows = [
        {"s": n, "k": 1, "t": at_s, "in": 10, "ctx": 0, "new": 10, "out": 5, "gap": None}
        for n, at_s in enumerate(starts_s)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_arrivals_are_the_traces_or_those_of_another(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "t.jsonl", [7.0, 8.0, 11.0])
    own = plan(Demand(f"sessions:{path}"))
    assert [one.starts_at_s for one in own] == [0, 1, 4]
    faster = plan(Demand(f"sessions:{path}", qps=5))
    assert [one.starts_at_s for one in faster] == pytest.approx([0, 0.1, 0.4])
    others = plan(Demand("paper:small_tiny", arrivals=f"sessions:{path}", conversations=2))
    assert [one.starts_at_s for one in others] == [0, 1]
    assert sizes_of(others[0]) == [(128, 128), (16, 32)]
    hastened = plan(Demand(f"sessions:{path}?faster=10"))
    assert [one.starts_at_s for one in hastened] == pytest.approx([0, 0.1, 0.4])
    many = plan(Demand(f"sessions:{path}", arrivals="poisson", conversations=7, qps=1))
    assert len(many) == 7


@pytest.mark.parametrize(
    ("demand", "named"),
    [
        (Demand("paper:nix", qps=1), r"no such workload; allowed: all small_tiny .*large_huge"),
        (Demand("nix", qps=1), "no such kind; allowed: paper:NAME turns:N grid mooncake:FILE"),
        (Demand("turns:8"), "has no arrivals: give --qps"),
        (Demand("turns:0", qps=1), "turns must be 1 to 1000"),
        (
            Demand("turns:8?think=1", qps=1),
            r"unknown field `think`; allowed: max_context, think_s",
        ),
        (Demand("turns:8?think_s=inf", qps=1), r"think_s"),
        (Demand("turns:8?new=0", qps=1), r">= 1.*new"),
        (Demand("turns:8?new", qps=1), r"\$.new"),
        (Demand("turns:8?new=1&new=2", qps=1), "KEY=VALUE, each once"),
        (Demand("turns:8?max_context=10", qps=1), "max_context must be at least 256"),
        (Demand("grid?context=100&new=300", qps=1), "leaves the first turn -146 tokens"),
        (Demand("grid?context=1e3", qps=1), "context must be numbers of tokens with commas"),
        (Demand("paper:small_tiny", qps=0), "qps must be above 0, got 0"),
        (Demand("paper:small_tiny", qps=1, scale=0), "scale must be above 0 and at most 1"),
        (Demand("paper:small_tiny", qps=1, conversations=0), "conversations must be at least 1"),
        (Demand("paper:small_tiny", arrivals="turns:2"), "turns:2: has no times of arrival"),
        (
            Demand("mooncake:/x?faster=0"),
            r"> 0.*faster.*; allowed: max_context, faster, block",
        ),
        (Demand("mooncake"), "must name its file, as mooncake:FILE"),
        (Demand("mooncake:/nowhere"), "/nowhere: cannot be read"),
        (Demand("tau-bench:/x", qps=1), "is text, its lengths are the model's: give --tokenizer"),
        (Demand("tau-bench:/x", qps=1, tokenizer=Path("/nowhere")), "/nowhere: no such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(demand: Demand, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(demand)


def test_more_than_a_trace_has_is_refused(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "t.jsonl", [0.0, 0.0])
    with pytest.raises(ConfigError, match=r"has 2 conversations, 3 are wanted; .*poisson"):
        plan(Demand(f"sessions:{path}", conversations=3))
    with pytest.raises(ConfigError, match=r"has 2 arrivals, 3 are wanted"):
        plan(Demand("turns:2", arrivals=f"sessions:{path}", conversations=3))
    with pytest.raises(ConfigError, match="all at one time"):
        plan(Demand(f"sessions:{path}", qps=1))


ROOT = Path(__file__).parents[2]
SPEC = re.compile(
    r"\b(?:paper|turns|grid|mooncake|azure|sessions|tau-bench|mt-bench-101|mini-swe|sharegpt|wildchat)"
    r"(?::[^\s'`|?]+)?\?[^\s'`|]+"
)


def test_the_documents_workloads_have_settings_that_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    specs = {spec for page in pages for spec in SPEC.findall(page.read_text())}
    assert len(specs) > 3
    refused = [refusal for refusal in map(refusal_of, specs) if refusal]
    # The files of traces are not there.
    assert not [text for text in refused if not re.search("cannot be read|give --token", text)]


def test_the_default_workload_of_emulated_clusters_exists() -> None:
    options = parser().parse_args(["emulate", "cluster", "1P1D"])
    assert load(options.workload).kinds


def refusal_of(spec: str) -> str:
    try:
        load(spec)
    except ConfigError as error:
        return str(error)
    return ""
