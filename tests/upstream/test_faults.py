"""Faults of SGLang: each is shown on SGLang as it is, and gone with what mends it here.

docs/UPSTREAM.md describes each of them.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from ppd.errors import RequestError
from router.intake.inbound import Endpoint, Served
from router.intake.requests import parse

from .conftest import Reproduction

_HOOKS = {"PPD_ENABLE": "1"}
_OLD = "0.5.21"


def test_a_transfer_and_a_retracted_request_wait_for_each_other(outcome_of: Reproduction) -> None:
    stuck = {"steps_after_the_transfer": 0, "retracted": 1, "in_transfer": 1}
    assert outcome_of("stand_still") == stuck
    mended = outcome_of("stand_still", **_HOOKS)
    assert mended["steps_after_the_transfer"] > 0
    assert (mended["retracted"], mended["in_transfer"]) == (0, 0)


def test_a_flush_frees_the_pages_of_an_aborted_transfer_twice(
    outcome_of: Reproduction, version: str
) -> None:
    refused = {"flushed": False, "errors": [], "free_tokens": 750}
    outcome, mended = outcome_of("flush"), outcome_of("flush", **_HOOKS)
    if version == _OLD:
        assert outcome == {"flushed": True, "errors": ["KeyError"], "free_tokens": 800}
        assert mended == refused | {"flushed_while_paused": True}
    else:  # mended upstream, but for servers that are paused
        assert outcome == mended == refused | {"flushed_while_paused": False}


def test_a_stream_begins_with_an_event_without_a_token(outcome_of: Reproduction) -> None:
    assert outcome_of("empty_event") == {"events": [["a", 1], ["b", 0]]}


def test_a_checksum_covers_decoded_tokens(outcome_of: Reproduction, version: str) -> None:
    digested = 70 if version == _OLD else 11  # the last decoded token has no KV yet
    assert outcome_of("checksum") == {"prompt": 70, "decoded": 20, "digested": digested}


def test_slices_of_heads_exceed_a_lane_of_mooncake(outcome_of: Reproduction) -> None:
    assert outcome_of("slices") == {
        "failed": True,
        "arrived": False,
        "bounded_failed": False,
        "bounded_arrived": True,
    }


@pytest.mark.parametrize(
    ("name", "fields", "error"),
    [
        ("input_ids", {"input_ids": [10, 1103]}, "IndexError"),
        ("top_logprobs_num", {"top_logprobs_num": 104}, "RuntimeError"),
        ("stop_token_ids", {"sampling_params": {"stop_token_ids": [1103]}}, "RuntimeError"),
    ],
)
def test_a_number_outside_the_vocabulary_ends_the_scheduler(
    outcome_of: Reproduction, name: str, fields: dict[str, Any], error: str
) -> None:
    assert outcome_of("vocabulary", name) == {"ended_by": error}
    with pytest.raises(RequestError, match=name):
        parse(
            Endpoint.GENERATE,
            orjson.dumps({"input_ids": [10], **fields}),
            "",
            Served(("default",), vocab_size=103),
        )


def test_all_samples_share_a_bootstrap_room(outcome_of: Reproduction) -> None:
    assert outcome_of("samples") == {"rooms": [5, 5, 5]}


def test_a_rank_refuses_the_rooms_that_are_its_own(outcome_of: Reproduction) -> None:
    assert outcome_of("data_parallel") == {"rank": 1, "refused": [3]}


def test_an_abort_ends_all_ids_that_begin_alike(outcome_of: Reproduction) -> None:
    assert outcome_of("abort_by_prefix") == {"aborted": ["1", "12"]}
