"""Chunks beside running decodes: bounded by what steps are seen to take, never starving."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.pacing import MIN_SLOWDOWN, ChunkCost, Pacer


def cost_ms(tokens: int, context: float) -> float:
    """A made-up machine: a fixed part, KV to read, a part for each token, attention."""
    return 3.0 + 2.5e-4 * context + 0.1 * tokens + 1e-5 * tokens * context


def run(pacer: Pacer, steps: int, *, decode_ms: float = 10.0, context: int = 4000) -> list[float]:
    """Let a long append run beside decodes; gives each decode token's gap."""
    gaps: list[float] = []
    for _ in range(steps):
        chunk = pacer.next_chunk(100_000, context)
        alone_ms = cost_ms(chunk.tokens, context)
        if pacer.mixed:
            step_ms = decode_ms + alone_ms - 3.0
            pacer.chunked(chunk.tokens, context, step_ms)
            gaps.append(step_ms)
        else:
            pacer.chunked(chunk.tokens, context, alone_ms)
            gaps.append(alone_ms + decode_ms)
        pacer.decoded(decode_ms)
        if pacer.mixed:
            gaps += [decode_ms] * chunk.decode_steps
        else:
            gaps += [decode_ms] * (chunk.decode_steps - 1)
    return gaps


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("target_ms", [None, 16.0, 20.0, 50.0])
def test_decodes_keep_the_target(mixed: bool, target_ms: float | None) -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=mixed, target_ms=target_ms)
    gaps = run(pacer, 400)[200:]
    target = max(target_ms or 0.0, MIN_SLOWDOWN * 10.0)
    assert sum(gaps) / len(gaps) <= 1.02 * target
    assert max(gaps) <= 2.05 * target


def test_a_looser_target_gives_larger_chunks() -> None:
    sizes = []
    for target_ms in (15.0, 20.0, 50.0, 1e5):
        pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, target_ms=target_ms)
        run(pacer, 200)
        sizes.append(pacer.next_chunk(100_000, 4000).tokens)
    assert sizes == sorted(sizes)
    assert sizes[0] < 256
    assert sizes[-1] == 2048


def test_a_longer_context_gives_smaller_chunks() -> None:
    pacer = Pacer(full_chunk=8192, page_size=1, mixed=True, target_ms=40.0)
    for context in (1000, 8000, 30_000) * 60:
        run(pacer, 2, context=context)
    near, far = (pacer.next_chunk(100_000, context).tokens for context in (1000, 30_000))
    assert far < 0.6 * near


def experts_ms(tokens: int) -> float:
    """What a chunk adds to a decode step with experts: few tokens read most of the weights."""
    return 20.0 * (1.0 - math.exp(-tokens / 32)) + 0.05 * tokens


def test_chunks_are_as_large_as_the_weights_they_read_ask_for() -> None:
    """The usual gap holds 39 tokens, of 0.41 ms each; in a full chunk one costs 0.055 ms."""
    pacer = Pacer(full_chunk=4096, page_size=1, mixed=True)
    pacer.decoded(10.0)
    gaps: list[float] = []
    lost_ms: list[float] = []
    for _ in range(300):
        chunk = pacer.next_chunk(100_000, 4000)
        lost_ms.append(experts_ms(chunk.tokens) / chunk.tokens)
        gaps += [10.0 + experts_ms(chunk.tokens), *[10.0] * chunk.decode_steps]
        pacer.chunked(chunk.tokens, 4000, 10.0 + experts_ms(chunk.tokens))
        for _ in range(chunk.decode_steps):
            pacer.decoded(10.0)
    assert max(lost_ms[20:]) <= 1.75 * experts_ms(4096) / 4096
    assert sum(gaps[200:]) / len(gaps[200:]) <= 1.02 * MIN_SLOWDOWN * 10.0


def test_decodes_that_miss_the_target_anyway_are_slowed_by_half_at_most() -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, target_ms=5.0)
    gaps = run(pacer, 300, decode_ms=40.0)[150:]
    assert 40.0 < sum(gaps) / len(gaps) <= 1.02 * MIN_SLOWDOWN * 40.0


def test_the_first_chunks_feel_their_way() -> None:
    pacer = Pacer(full_chunk=4096, page_size=1, mixed=True, target_ms=1000.0)
    sizes = []
    for _ in range(12):
        chunk = pacer.next_chunk(100_000, 0)
        sizes.append(chunk.tokens)
        pacer.chunked(chunk.tokens, 0, 1.0)
        pacer.decoded(1.0)
    assert all(after <= 2 * max(before, 32) for before, after in pairwise(sizes))
    assert sizes[-1] == 4096


def test_a_small_rest_goes_with_the_last_chunk() -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, target_ms=30.0)
    run(pacer, 200)
    usual = pacer.next_chunk(100_000, 4000).tokens
    assert pacer.next_chunk(round(1.4 * usual), 4000).tokens == round(1.4 * usual)
    assert pacer.next_chunk(round(1.7 * usual), 4000).tokens == usual


@pytest.mark.parametrize("mixed", [True, False])
def test_decodes_keep_the_target_beside_many_short_appends(mixed: bool) -> None:
    """A chunk holds several appends; the decode steps after it are those of all of them."""
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=mixed, target_ms=20.0)
    run(pacer, 200)
    pacer.decoded(10.0)  # else two steps are due, to measure decodes alone
    one, many = pacer.next_chunk(16, 4000), pacer.next_chunk(16, 4000, behind=100_000)
    long = pacer.next_chunk(100_016, 4000)
    assert many == long
    assert one.decode_steps < many.decode_steps


def test_a_fixed_chunk_stays() -> None:
    pacer = Pacer(full_chunk=2048, page_size=16, mixed=False, fixed_chunk=100)
    run(pacer, 50)
    chunk = pacer.next_chunk(5000, 0)
    assert (chunk.tokens, chunk.decode_steps) == (96, 1)


def test_decodes_alone_are_seen_again_and_again() -> None:
    """Mixed steps do not tell what a decode step takes without them."""
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, target_ms=30.0)
    pacer.decoded(10.0)
    for _ in range(100):
        chunk = pacer.next_chunk(5000, 0)
        if chunk.decode_steps:
            break
        pacer.chunked(chunk.tokens, 0, 12.0)
    else:
        pytest.fail("no decode step was left alone")


@pytest.mark.parametrize("mixed", [True, False])
def test_decode_steps_that_grow_are_noticed_under_steady_appends(mixed: bool) -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=mixed, target_ms=80.0)
    run(pacer, 100, decode_ms=10.0)
    for _ in range(600):
        chunk = pacer.next_chunk(100_000, 4000)
        pacer.chunked(chunk.tokens, 4000, cost_ms(chunk.tokens, 4000) + 27.0 * mixed)
        for _ in range(chunk.decode_steps):
            pacer.decoded(30.0)
    assert pacer.decode_ms == pytest.approx(30.0, rel=0.1)


def test_one_step_that_hung_does_not_stop_appends() -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, target_ms=30.0)
    run(pacer, 100)
    before = pacer.next_chunk(5000, 4000).tokens
    pacer.chunked(before, 4000, 60_000.0)
    pacer.decoded(60_000.0)
    run(pacer, 60)
    assert pacer.next_chunk(5000, 4000).tokens >= 0.5 * before


@given(
    st.integers(1, 8192),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
    st.one_of(st.none(), st.floats(0.1, 1e6)),
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 8192), st.floats(0, 1e5), st.floats(0, 1e6)),
        max_size=60,
    ),
    st.integers(1, 100_000),
    st.floats(0, 1e6),
    st.integers(0, 100_000),
)
def test_there_is_always_a_chunk_of_whole_pages(
    full: int,
    page: int,
    mixed: bool,
    target_ms: float | None,
    steps: list[tuple[bool, int, float, float]],
    rest: int,
    context: float,
    behind: int,
) -> None:
    pacer = Pacer(full_chunk=max(full, page), page_size=page, mixed=mixed, target_ms=target_ms)
    for is_chunk, tokens, at, ms in steps:
        if is_chunk:
            pacer.chunked(tokens, at, ms)
        else:
            pacer.decoded(ms)
    chunk = pacer.next_chunk(rest, context, behind)
    assert chunk.tokens % page == 0
    assert page <= chunk.tokens <= max(full, page)
    assert 0 <= chunk.decode_steps <= 16


def test_the_cost_estimate_follows_what_is_measured() -> None:
    cost, source = ChunkCost(), random.Random(0)
    for scale in (1.0, 3.0):
        for _ in range(400):
            tokens, context = source.randint(16, 1024), source.randint(0, 16_000)
            noise = source.uniform(0.9, 1.1)
            cost.observe(tokens, context, scale * noise * cost_ms(tokens, context))
        for tokens, context in ((32, 1000), (256, 8000), (1000, 15_000)):
            expected = scale * cost_ms(tokens, context)
            assert cost.ms(tokens, context) == pytest.approx(expected, rel=0.15, abs=5.0)


def run_speculating(pacer: Pacer, steps: int, *, mixed_ms: float, alone_ms: float) -> list[bool]:
    """Let a long append run beside decodes that get four tokens a step; gives each chunk's kind."""
    kinds = []
    for _ in range(steps):
        chunk = pacer.next_chunk(100_000, 0)
        kinds.append(chunk.mixed)
        ms = (mixed_ms if chunk.mixed else alone_ms) + 0.1 * chunk.tokens
        pacer.chunked(chunk.tokens, 0, ms, mixed=chunk.mixed)
        for _ in range(max(1, chunk.decode_steps)):
            pacer.decoded(20.0, 4.0)
    return kinds


def test_the_time_of_a_token_is_told_where_a_step_gives_several() -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=False, speculative=True)
    for _ in range(100):
        pacer.decoded(20.0, 4.0)
    assert pacer.decode_ms == pytest.approx(5.0)


@pytest.mark.parametrize(("mixed_ms", "mixed"), [(22.0, False), (6.0, True)])
def test_the_cheaper_kind_of_chunk_is_chosen(mixed_ms: float, mixed: bool) -> None:
    """Chunks alone have a fixed cost of 10 ms; mixed ones give a token, which takes 5 ms."""
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=True, speculative=True, target_ms=30.0)
    kinds = run_speculating(pacer, 300, mixed_ms=mixed_ms, alone_ms=10.0)
    assert {True, False} == set(kinds[:16]), "both kinds are measured"
    later = kinds[100:]
    assert later.count(mixed) >= 0.97 * len(later)
    assert later.count(not mixed) >= 1, "the other kind is measured again"


def test_decodes_that_speculate_keep_the_target() -> None:
    pacer = Pacer(full_chunk=2048, page_size=1, mixed=False, speculative=True, target_ms=10.0)
    for _ in range(20):
        pacer.decoded(20.0, 4.0)
    spent_ms = tokens = 0.0
    for i in range(400):
        chunk = pacer.next_chunk(100_000, 4000)
        ms = cost_ms(chunk.tokens, 4000)
        pacer.chunked(chunk.tokens, 4000, ms)
        for _ in range(chunk.decode_steps):
            pacer.decoded(20.0, 4.0)
        if i >= 200:
            spent_ms += ms + 20.0 * chunk.decode_steps
            tokens += 4.0 * chunk.decode_steps
    assert 8.0 < spent_ms / tokens <= 1.02 * 10.0
