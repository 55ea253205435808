"""The parsing of SGLang's answers and KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.workers.sglang import (
    Load,
    Usage,
    loads_of,
    stop_string_of,
    total_usage,
    usage_of_openai,
)
from router.workers.sglang_events import (
    BlocksRemoved,
    CacheCleared,
    decode_kv_events,
    is_device_tier,
    split_kv_message,
)


def test_usage_with_null_details() -> None:
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}
    assert usage_of_openai({"usage": {**counts, "reasoning_tokens": 1}}) == Usage(5, 2, 0, 1)
    assert usage_of_openai({"usage": None}) is None


def test_total_usage() -> None:
    assert total_usage([Usage(5, 2, 1), Usage(6, 3, 0, 2)]) == Usage(11, 5, 1, 2)
    assert total_usage([]) is None


@pytest.mark.parametrize(
    ("choice", "stop_string"),
    [
        ({"finish_reason": "stop", "matched_stop": "!"}, "!"),
        ({"finish_reason": "stop", "matched_stop": 2}, None),  # a stop token
        ({"finish_reason": "length", "matched_stop": "!"}, None),
        ({"finish_reason": "stop"}, None),
    ],
)
def test_stop_strings(choice: dict[str, Any], stop_string: str | None) -> None:
    assert stop_string_of(choice) == stop_string


def test_a_report_that_was_not_written_again_is_of_an_idle_worker() -> None:
    report = {"max_total_num_tokens": 10, "num_total_tokens": 4, "num_running_reqs": 2}
    answer = {"loads": [{**report, "timestamp": 7.0}]}
    (first,) = loads_of(answer, [None])
    assert first == Load(running=2, free_tokens=6, written_at_s=7.0)
    assert loads_of(answer, [first])[0].running == 0


def test_the_load_of_ranks_is_reported_in_any_order() -> None:
    report = {"max_total_num_tokens": 10, "num_running_reqs": 1, "timestamp": 7.0}
    loads = [{**report, "dp_rank": rank, "num_total_tokens": rank} for rank in (2, 0, 1)]
    assert [load.free_tokens for load in loads_of({"loads": loads}, [None] * 3)] == [10, 9, 8]
    with pytest.raises(LookupError):
        loads_of({"loads": loads[:2]}, [None] * 3)


def test_kv_events() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1, -2], "medium": "GPU", "unknown": 3}
    payload = msgspec.msgpack.encode([1.0, [removed, {"type": "AllBlocksCleared"}]])
    assert split_kv_message([b"topic", b"\0\0\0\0\0\0\1\2", payload]) == (258, payload)
    assert decode_kv_events(payload) == [BlocksRemoved([1, -2], "GPU"), CacheCleared()]
    assert [is_device_tier(tier) for tier in ("GPU", None, "CPU_PINNED")] == [True, True, False]


@pytest.mark.parametrize(
    "payload", [b"", b"no msgpack", msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]])]
)
def test_malformed_kv_events_are_value_errors(payload: bytes) -> None:
    with pytest.raises(ValueError, match="malformed batch"):
        decode_kv_events(payload)


def test_a_message_of_another_number_of_frames_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unpack"):
        split_kv_message([b"topic"])
