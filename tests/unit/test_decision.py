"""What no policy may choose, and the policies that need no table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.decision import (
    Decision,
    HomeState,
    Reason,
    Route,
    decide,
    min_cached_tokens,
    predicted_cached_tokens,
)
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Weights

from .fixtures import FEATURES

SPECS = ("replica", "pd", "full", "partial:0.5", "threshold", "threshold:uncached=100")


@pytest.mark.parametrize("spec", SPECS)
def test_no_policy_is_asked_what_it_cannot_choose(spec: str) -> None:
    policy = static_policy(spec)
    opening = Route.REPLICA if spec == "replica" else Route.REMOTE
    assert decide(None, policy, Weights()) == Decision(opening, Reason.FIRST_TURN)
    for state, reason in (
        (HomeState.GONE, Reason.HOME_GONE),
        (HomeState.UNPATCHED, Reason.HOME_UNPATCHED),
    ):
        features = replace(FEATURES, home=state)
        assert decide(features, policy, Weights()) == Decision(opening, reason)
    # With nothing to insist on, a local turn could be a whole first prefill.
    features = replace(FEATURES, earlier_prompt_tokens=30)
    assert decide(features, policy, Weights()) == Decision(opening, Reason.SHORT_PREFIX)


@pytest.mark.parametrize("spec", SPECS)
def test_a_home_that_has_dropped_the_prefix_is_not_asked(spec: str) -> None:
    policy = static_policy(spec)
    least = FEATURES.min_cached_tokens
    gone = replace(FEATURES, evicted_tokens=FEATURES.context_tokens - least + 1)
    assert decide(gone, policy, Weights()) == Decision(policy.opening, Reason.EVICTED)
    reply_gone = replace(FEATURES, evicted_tokens=FEATURES.context_tokens - least)
    assert decide(reply_gone, policy, Weights()).reason is not Reason.EVICTED
    assert reply_gone.uncached_at_home == FEATURES.prompt_tokens - least
    assert reply_gone.uncached_at_prefill == FEATURES.uncached_at_prefill


def choose(spec: str, **changes: Any) -> Route:
    return static_policy(spec).choose(replace(FEATURES, **changes), Weights()).route


def test_fixed_policies() -> None:
    assert choose("replica") is Route.REPLICA
    assert choose("pd") is Route.REMOTE
    assert choose("full") is Route.LOCAL


def test_partial_keeps_a_conversation_on_its_route() -> None:
    names = [f"session{i}" for i in range(2000)]
    local = {name for name in names if choose("partial:0.3", session=name) is Route.LOCAL}
    assert 500 < len(local) < 700
    assert all(choose("partial:0.3", session=name, turn=9) is Route.LOCAL for name in local)
    more = {name for name in names if choose("partial:0.6", session=name) is Route.LOCAL}
    assert local < more
    assert choose("partial:0") is Route.REMOTE
    assert choose("partial:1") is Route.LOCAL


def test_turns_with_media_go_remote() -> None:
    pictured = replace(FEATURES, has_media=True)
    full = static_policy("full")
    assert decide(FEATURES, full, Weights()).route is Route.LOCAL
    assert decide(pictured, full, Weights()) == Decision(Route.REMOTE, Reason.MEDIA)
    gone = replace(pictured, home=HomeState.GONE)
    assert decide(gone, full, Weights()).reason is Reason.HOME_GONE


def test_without_a_prefill_worker_a_home_serves_what_it_can() -> None:
    down = replace(FEATURES, has_prefill=False)
    for name in ("pd", "full", "threshold"):
        found = decide(down, static_policy(name), Weights())
        assert found == Decision(Route.LOCAL, Reason.PREFILL_DOWN)
    gone = replace(down, home=HomeState.GONE)
    assert decide(gone, static_policy("full"), Weights()).reason is Reason.HOME_GONE
    assert decide(down, static_policy("replica"), Weights()).route is Route.REPLICA


def test_dynamos_rule() -> None:
    assert choose("threshold", context_tokens=8000, new_tokens=2047) is Route.LOCAL
    assert choose("threshold", context_tokens=8000, new_tokens=2048) is Route.REMOTE
    assert choose("threshold", context_tokens=480, new_tokens=1500) is Route.REMOTE  # 76 % new
    busy: dict[str, Any] = {
        "context_tokens": 8000,
        "new_tokens": 4000,
        "prefill_queue_tokens": 9000,
    }
    assert choose("threshold", **busy) is Route.REMOTE
    assert choose("threshold:busy=8192", **busy) is Route.LOCAL
    assert choose("threshold:busy=8192", home_free_tokens=4000, **busy) is Route.REMOTE


def test_llm_ds_rule() -> None:
    # 1000 tokens of context are 62 pages and 8 tokens that must be computed again.
    assert choose("threshold:uncached=100", new_tokens=91) is Route.LOCAL
    assert choose("threshold:uncached=100", new_tokens=92) is Route.REMOTE


@pytest.mark.parametrize("spec", ["", "ppd", "pd:1", "partial", "partial:nan", "threshold:x=1"])
def test_wrong_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        static_policy(spec)


@given(st.integers(0, 10**6), st.sampled_from([1, 16, 64]))
def test_the_precondition_never_asks_for_more_than_is_predicted(tokens: int, page: int) -> None:
    least = min_cached_tokens(tokens, page)
    assert 0 <= least <= predicted_cached_tokens(tokens, page) <= tokens
    assert least % page == 0
