"""Times of a prefill worker, found in the quiet times of a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.prefill_times import PrefillTimes, prefill_times

CONTEXTS = [2048.0, 8192.0, 32768.0]
NEWS = [48.0, 320.0, 1536.0, 6144.0]
MS = st.floats(1e-6, 1.0)


@given(MS, st.floats(0, 1e-4), MS)
def test_times_are_found_again(token_ms: float, attention_ms: float, transfer_ms: float) -> None:
    true = PrefillTimes(token_ms, attention_ms, transfer_ms)
    prompts_ms = [true.compute_ms(0.0, context) + transfer_ms * context for context in CONTEXTS]
    mean = sum(CONTEXTS) / len(CONTEXTS)
    slope = sum((c - mean) * ms for c, ms in zip(CONTEXTS, prompts_ms, strict=True)) / sum(
        (c - mean) ** 2 for c in CONTEXTS
    )
    found = prefill_times(CONTEXTS, NEWS, lambda c, n: 7.0 + true.compute_ms(c, n), 0.03, slope)
    largest = true.compute_ms(32768, 6144)
    assert found.compute_ms(32768, 6144) == pytest.approx(largest, rel=1e-6)
    assert found.compute_ms(0, 1000) == pytest.approx(true.compute_ms(0, 1000), rel=1e-3, abs=1e-5)
    assert found.transfer_ms == pytest.approx(transfer_ms, rel=1e-3, abs=1e-4)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    times = PrefillTimes(0.02, 1e-6, 0.01)
    parts_ms = times.compute_ms(0, 3000) + times.compute_ms(3000, 5000)
    assert times.compute_ms(0, 8000) == pytest.approx(parts_ms)


@pytest.mark.parametrize(("contexts", "news"), [([512.0], NEWS), (CONTEXTS, [64.0])])
def test_an_axis_of_one_point_shows_no_attention(contexts: list[float], news: list[float]) -> None:
    found = prefill_times(contexts, news, lambda c, n: 9.0 + c + n, 0.03, 0.05)
    assert (found.token_ms, found.attention_ms) == (0.03, 0.0)
    assert found.transfer_ms == pytest.approx(0.02)


def test_noise_makes_no_time_negative() -> None:
    found = prefill_times(CONTEXTS, NEWS, lambda c, n: 1e6 - c - n, 0.03, 0.01)
    assert (found.attention_ms, found.transfer_ms) == (0.0, 0.0)
    assert found.token_ms == pytest.approx(0.01)


def test_prefill_workers_may_be_faster_than_appends() -> None:
    slow = PrefillTimes(0.02, 1e-6, 0.0)
    found = prefill_times(CONTEXTS, NEWS, slow.compute_ms, 0.03, 0.01)
    assert found.transfer_ms == 0
    assert found.token_ms / slow.token_ms == pytest.approx(found.attention_ms / slow.attention_ms)
    rise_ms = found.compute_ms(0, 32768) - found.compute_ms(0, 2048)
    assert rise_ms / (32768 - 2048) == pytest.approx(0.01, rel=0.05)
