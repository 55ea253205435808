"""Routes and reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.decision import (
    POLICIES,
    Decision,
    Features,
    HomeState,
    Policy,
    Reason,
    Route,
    decide,
    least_cached_tokens,
    predicted_cached_tokens,
)

FEATURES = Features(
    turn=2,
    context_tokens=1000,
    least_cached_tokens=896,
    new_tokens=20,
    prefill_tokens=900,
    page_size=16,
    home=HomeState.READY,
)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda p: p.name)
def test_no_policy_is_asked_what_it_cannot_choose(policy: Policy) -> None:
    assert decide(None, policy) == Decision(Route.REMOTE, Reason.FIRST_TURN)
    for state, reason in (
        (HomeState.GONE, Reason.HOME_GONE),
        (HomeState.UNPATCHED, Reason.HOME_UNPATCHED),
    ):
        features = replace(FEATURES, home=state)
        assert decide(features, policy) == Decision(Route.REMOTE, reason)


def test_a_short_prefix_makes_no_home() -> None:
    features = replace(FEATURES, least_cached_tokens=0)
    assert decide(features, POLICIES["full"]) == Decision(Route.REMOTE, Reason.SHORT_PREFIX)


def test_static_policies() -> None:
    assert decide(FEATURES, POLICIES["pd"]) == Decision(Route.REMOTE, Reason.POLICY_PD)
    assert decide(FEATURES, POLICIES["full"]) == Decision(Route.LOCAL, Reason.POLICY_FULL)


@given(st.integers(0, 10**6), st.sampled_from([1, 16, 64]))
def test_the_precondition_never_asks_for_more_than_is_predicted(tokens: int, page: int) -> None:
    least = least_cached_tokens(tokens, page)
    assert 0 <= least <= predicted_cached_tokens(tokens, page) <= tokens
    assert least % page == 0
