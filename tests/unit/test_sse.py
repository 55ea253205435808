"""Cutting and watching event streams."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.sse import DONE, EventCutter, Tail, parse_event, split_events
from router.workers.sglang import Usage, error_of


def event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


TEXT = event({"choices": [{"delta": {"content": 'a "usage":{"prompt_tokens":9} b'}}]})
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}
LAST = event({"choices": [], "usage": USAGE})


@given(st.lists(st.integers(1, 60)))
def test_blocks_hold_whole_events_whatever_the_network_does(cuts: list[int]) -> None:
    stream = TEXT * 3 + LAST + DONE
    cutter, out, at = EventCutter(), b"", 0
    for cut in [*cuts, len(stream)]:
        block = cutter.feed(stream[at : at + cut])
        assert block == b"" or block.endswith(b"\n\n")
        out, at = out + block, at + cut
    assert out == stream


def test_the_usage_event_is_read_and_hidden() -> None:
    tail = Tail(hide_usage=True, native=False)
    assert tail.pass_on(TEXT) == TEXT
    assert tail.pass_on(LAST + DONE) == DONE
    assert tail.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    assert tail.done


def test_the_usage_event_is_left_to_who_asked() -> None:
    tail = Tail(hide_usage=False, native=False)
    assert tail.pass_on(LAST + DONE) == LAST + DONE
    assert tail.usage is not None


def test_events_with_choices_are_never_hidden() -> None:
    continuous = event({"choices": [{"index": 0}], "usage": USAGE})
    assert Tail(hide_usage=True, native=False).pass_on(continuous) == continuous


def test_nothing_cached_is_null_on_the_wire() -> None:
    tail = Tail(hide_usage=True, native=False)
    tail.pass_on(event({"choices": [], "usage": {**USAGE, "prompt_tokens_details": None}}))
    assert tail.usage is not None
    assert tail.usage.cached_tokens == 0


def test_an_error_without_counts_fails_a_batch() -> None:
    tail = Tail(hide_usage=True, native=True, batch=True)
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 0}
    tail.pass_on(event({"text": "a", "index": 0, "meta_info": counts}))
    before = tail.failed
    tail.pass_on(event({"error": {"message": "out of memory", "code": 500}}) + DONE)
    assert (before, tail.failed) == (False, True)
    assert tail.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=0)


def test_a_native_stream_is_read_at_its_end() -> None:
    def native(n: int) -> bytes:
        meta = {"prompt_tokens": 5, "completion_tokens": n, "cached_tokens": 4}
        return event({"text": "x" * n, "meta_info": meta})

    tail = Tail(hide_usage=True, native=True)
    blocks = [native(1), native(2), native(3) + DONE]
    assert b"".join(map(tail.pass_on, blocks)) == b"".join(blocks)
    assert tail.usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        ({"error": {"message": "m", "code": 503, "type": "SERVICE_UNAVAILABLE"}}, 503, "SERVICE_"),
        ({"object": "error", "message": "m", "code": 400, "type": "BadRequestError"}, 400, "Bad"),
        ({"error": {"message": "m"}}, 500, "engine_error"),
        (
            {"meta_info": {"finish_reason": {"type": "abort", "message": "m", "status_code": 503}}},
            503,
            "engine_error",
        ),
    ],
)
def test_errors_in_every_form(answer: object, status: int, kind: str) -> None:
    error = error_of(answer, 200)
    assert error is not None
    assert (error.status, error.message) == (status, "m")
    assert error.kind.startswith(kind)


def test_answers_are_no_errors() -> None:
    assert error_of(parse_event(TEXT), 200) is None
    assert error_of(parse_event(DONE), 200) is None
    assert error_of({"meta_info": {"finish_reason": {"type": "length"}}}, 200) is None
    assert split_events(TEXT + DONE) == [TEXT, DONE]
