"""The wire contract: marker, terms, refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.contract import (
    LOCAL_MARKER,
    LocalTerms,
    Refusal,
    RefusalReason,
    is_marked,
    parse_refusal,
    parse_terms,
)
from ppd.errors import ContractError


@given(st.integers(0, 10**9))
def test_terms_survive_the_wire(least: int) -> None:
    sent = json.loads(json.dumps(LocalTerms(least).to_custom_params()))
    assert is_marked(sent)
    assert parse_terms(sent) == LocalTerms(least)


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {LOCAL_MARKER: False}, "x", [1]])
def test_unmarked(params: object) -> None:
    assert not is_marked(params)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (None, "custom_params must be an object, got None"),
        ({LOCAL_MARKER: "yes"}, "do_local_prefill must be true, got 'yes'"),
        ({LOCAL_MARKER: True, "min_cached_tokens": -1}, "min_cached_tokens"),
        ({LOCAL_MARKER: True, "min_cached_tokens": True}, "min_cached_tokens"),
        ({LOCAL_MARKER: True, "min_cached_tokens": "9"}, "got '9'"),
    ],
)
def test_malformed_terms_are_named(params: object, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        parse_terms(params)


@given(
    st.builds(
        Refusal,
        reason=st.sampled_from(RefusalReason),
        cached_tokens=st.integers(0, 10**6),
        min_cached_tokens=st.integers(0, 10**6),
        detail=st.text(max_size=50),
        flushes=st.none() | st.integers(0, 10**6),
    ),
    st.text(max_size=20),
)
def test_a_refusal_is_read_at_the_start_of_a_message_only(refusal: Refusal, around: str) -> None:
    message = refusal.to_message()
    assert parse_refusal(message + around) == refusal
    assert parse_refusal(f"1 validation error: {around}{message}") is None


@pytest.mark.parametrize(
    "message", ["", "out of memory", "ppd-refusal", "ppd-refusal {}", 'ppd-refusal {"reason":"x"}']
)
def test_other_errors_are_no_refusal(message: str) -> None:
    assert parse_refusal(message) is None
