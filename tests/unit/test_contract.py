"""The wire contract: marker, terms, refusal, description."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.contract import (
    LOCAL_MARKER,
    LocalTerms,
    Refusal,
    RefusalReason,
    WorkerDescription,
    is_marked,
    parse_description,
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


DESCRIPTION: dict[str, Any] = {"version": 1, "boot_id": "b", "local_prefill": True}


def test_a_description_survives_the_wire() -> None:
    description = WorkerDescription(
        **DESCRIPTION,
        plugin_version="0.1.0",
        vocab_size=4096,
        flushes=2,
        kv_token_bytes=512,
        special_tokens=("<x>",),
        running=3,
        decode_step_ms=7.5,
        accepted=4,
    )
    sent = json.loads(json.dumps(description.to_json_object()))
    assert parse_description(sent) == description
    assert sent["running"] == 3, "the load stands beside the other fields"
    assert "accepted" in sent
    assert "requeued" not in sent, "a counter that is not kept is not sent"


def test_unknown_fields_of_a_description_are_ignored() -> None:
    parsed = parse_description({**DESCRIPTION, "moods": ["fine"], "load": {"running": "x"}})
    assert parsed == WorkerDescription(**DESCRIPTION)
    assert parsed.flushes is None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(None, id="no plugin"),
        pytest.param({"boot_id": "b", "local_prefill": True}, id="no version"),
        pytest.param({**DESCRIPTION, "version": "0.1.0"}, id="before versions were numbers"),
        pytest.param({**DESCRIPTION, "version": 0}, id="older"),
        pytest.param({**DESCRIPTION, "version": 2}, id="newer"),
        pytest.param({**DESCRIPTION, "version": True}, id="no number"),
        pytest.param({"version": 1, "local_prefill": True}, id="no boot_id"),
        pytest.param({**DESCRIPTION, "boot_id": 3}, id="boot_id is no string"),
        pytest.param({**DESCRIPTION, "flushes": -1}, id="a count below 0"),
        pytest.param({**DESCRIPTION, "special_tokens": "<x>"}, id="no list"),
        pytest.param([DESCRIPTION], id="no object"),
        pytest.param("ppd", id="a string"),
    ],
)
def test_a_description_that_cannot_be_used_is_none(data: object) -> None:
    assert parse_description(data) is None
