"""Predicted lengths, and the arrival rate."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.arrivals import WINDOW_S, ArrivalRate
from ppd.forecast import Forecast, blend, further_tokens


def test_a_conversation_is_expected_to_go_on_as_it_was() -> None:
    usual = None
    for _ in range(20):
        usual = blend(usual, 400)
    assert Forecast().reply_tokens("t", usual, None) == 400
    assert Forecast().reply_tokens("t", usual, 100) == 100, "capped by the request's own limit"


def test_a_tenants_replies_forecast_its_new_conversations() -> None:
    forecast = Forecast()
    before = forecast.reply_tokens("t", None, None)
    for _ in range(20):
        forecast.learn_reply("t", None, 10)
    assert forecast.reply_tokens("t", None, None) == 10
    assert forecast.reply_tokens("other", None, None) == before
    assert 10 < forecast.reply_tokens("t", 400.0, None) < 400


def test_recent_replies_count_more() -> None:
    usual = None
    for tokens in (1000, 1000, 1000, 10, 10, 10, 10, 10, 10):
        usual = blend(usual, tokens)
    assert usual is not None
    assert 10 < usual < 50


def test_the_error_is_reported() -> None:
    forecast = Forecast()
    assert forecast.typically_off is None
    assert forecast.learn_reply("t", 100, 50) == 2.0
    assert forecast.learn_reply("t", 50, 100) == 2.0
    assert forecast.typically_off == pytest.approx(2.0)


@given(st.lists(st.integers(0, 10**5), max_size=30), st.none() | st.integers(1, 10**5))
def test_a_forecast_is_always_a_length(replies: list[int], most: int | None) -> None:
    forecast, usual = Forecast(), None
    for tokens in replies:
        forecast.learn_reply("t", None, tokens)
        usual = blend(usual, tokens)
    tokens = forecast.reply_tokens("t", usual, most)
    assert 1 <= tokens <= (most or 10**5)


def test_bytes_of_a_prompt_become_tokens() -> None:
    forecast = Forecast()
    for _ in range(100):
        forecast.learn_prompt("chat", 1000, 800)
    assert forecast.prompt_tokens("chat", 5000) == pytest.approx(4000, rel=0.03)
    assert forecast.prompt_tokens("ids", 5000) == 1250


def test_what_a_template_adds_to_short_prompts_is_not_multiplied() -> None:
    """40 tokens of which the message has one: a pasted page has not 20 tokens a byte."""
    forecast = Forecast()
    for _ in range(100):
        forecast.learn_prompt("chat", 2, 40)
    assert forecast.prompt_tokens("chat", 100_000) < 200_000
    assert further_tokens(20_000, 40, 2) < 10_000
    forecast.learn_prompt("chat", 100_000, 25_000)
    assert forecast.prompt_tokens("chat", 100_000) == pytest.approx(25_000, rel=0.5)


def test_one_unusual_prompt_does_not_outweigh_all_others() -> None:
    forecast = Forecast()
    for _ in range(300):
        forecast.learn_prompt("chat", 4000, 1000)
    forecast.learn_prompt("chat", 4_000_000, 80_000)
    assert forecast.prompt_tokens("chat", 40_000) == pytest.approx(10_000, rel=0.15)


def test_text_after_a_long_prompt_has_its_ratio() -> None:
    assert further_tokens(1000, 100_000, 100_000) == pytest.approx(1000, rel=0.01)


def test_the_rate_of_a_steady_stream() -> None:
    rate = ArrivalRate()
    for i in range(1000):
        rate.note(0.1 * i)
    assert rate.per_second(100.0) == pytest.approx(10.0, rel=0.05)
    assert rate.per_second(100.0 + WINDOW_S + 1) == 0.0


def test_a_window_that_has_only_begun() -> None:
    rate = ArrivalRate()
    assert rate.per_second(5.0) == 0.0
    rate.note(5.0)
    rate.note(5.0)
    assert rate.per_second(5.0) == 2.0, "two at once are no infinite rate"
    assert rate.per_second(15.0) == pytest.approx(0.2)


def test_arrivals_that_nobody_asks_for_take_no_memory() -> None:
    rate, size = ArrivalRate(), 0
    for i in range(2000):
        rate.note(1.0 * i)
        if i == 100:
            size = len(pickle.dumps(rate))
    assert len(pickle.dumps(rate)) <= 1.1 * size


@given(st.lists(st.floats(0, 5), max_size=300))
def test_the_rate_counts_what_the_window_holds(gaps: list[float]) -> None:
    rate, now_s, arrivals = ArrivalRate(), 0.0, list[float]()
    for gap in gaps:
        now_s += gap
        rate.note(now_s)
        arrivals.append(now_s)
        counted = rate.per_second(now_s) * min(WINDOW_S, max(1.0, now_s - arrivals[0]))
        slot_s = WINDOW_S / 60
        least = sum(at > now_s - WINDOW_S + slot_s for at in arrivals)
        most = sum(at > now_s - WINDOW_S - slot_s for at in arrivals)
        assert least - 1e-6 <= counted <= most + 1e-6
