"""``do_local_prefill`` at the top level of bodies, as an argument, and the flag of the draft."""

from __future__ import annotations

import argparse
from typing import Any

import orjson
import pytest

from sglang_patches.request_field import (
    FLAG,
    Message,
    RequestField,
    add_cli_args,
    async_generate,
    moved,
)

MARKED = {"do_local_prefill": True, "min_cached_tokens": 64}


def test_fields_move_into_custom_params() -> None:
    given = {"model": "m", "custom_params": {"a": 1}, **MARKED}
    found = moved(given, None)
    assert found == {"model": "m", "custom_params": {"a": 1, **MARKED}}
    assert given["do_local_prefill"] is True  # the caller's object is as it was


@pytest.mark.parametrize("value", [False, None])
def test_a_marker_that_is_not_set_is_dropped_with_its_precondition(value: object) -> None:
    assert moved({"text": "t", "do_local_prefill": value, "min_cached_tokens": 5}, None) == {
        "text": "t"
    }
    assert moved({"text": "t", "min_cached_tokens": 5}, None) == {"text": "t"}


def test_generate_has_custom_params_in_its_sampling_parameters() -> None:
    assert moved({"text": "t", **MARKED}, "sampling_params") == {
        "text": "t",
        "sampling_params": {"custom_params": MARKED},
    }
    batch = moved({"sampling_params": [{"top_k": 1}, {}], **MARKED}, "sampling_params")
    assert batch["sampling_params"] == [
        {"top_k": 1, "custom_params": MARKED},
        {"custom_params": MARKED},
    ]


@pytest.mark.parametrize("within", [None, "sampling_params"])
def test_what_sglang_refuses_is_left_to_it(within: str | None) -> None:
    given = {"custom_params": 7, "sampling_params": 7, **MARKED}
    found = moved(given, within)
    assert (found["custom_params"], found["sampling_params"]) == (7, 7)


async def through(path: str, *parts: bytes) -> tuple[bytes, Message]:
    """Send a body in parts through the middleware; return what the application got."""
    got: list[tuple[bytes, Message]] = []
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def application(scope: Message, receive: Any, _send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        got.append((body, scope))

    async def receive() -> Message:
        return messages.pop(0)

    length = str(sum(map(len, parts))).encode()
    scope: Message = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"Content-Length", length)],
    }
    await RequestField(application)(scope, receive, None)
    return got[0]


async def test_a_body_is_changed_with_its_length() -> None:
    whole = orjson.dumps({"prompt": "p", **MARKED})
    body, scope = await through("/v1/completions", whole[:9], whole[9:])
    assert orjson.loads(body) == {"prompt": "p", "custom_params": MARKED}
    assert scope["headers"] == [(b"Content-Length", str(len(body)).encode())]


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "p"}', b'{"prompt": "\\"do_local_prefill\\""}', b'{"do_local_prefill"', b"[]"],
)
async def test_other_bodies_pass_unchanged(body: bytes) -> None:
    assert (await through("/v1/completions", body))[0] == body
    marked = orjson.dumps({"a": 1, **MARKED})
    assert (await through("/v1/embeddings", marked))[0] == marked


async def test_a_client_that_leaves_is_passed_on() -> None:
    seen: list[str] = []

    async def application(_scope: Message, receive: Any, _send: Any) -> None:
        seen.append((await receive())["type"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope: Message = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    await RequestField(application)(scope, receive, None)
    assert seen == ["http.disconnect"]


def test_the_engine_takes_the_fields_as_arguments() -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def original(_self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    async_generate(original, None, "prompt", {"top_k": 1}, **MARKED)
    async_generate(original, None, input_ids=[1], do_local_prefill=True)
    async_generate(original, None, "prompt", do_local_prefill=False)
    assert seen == [
        (("prompt", {"top_k": 1, "custom_params": MARKED}), {}),
        (
            (),
            {
                "input_ids": [1],
                "sampling_params": {"custom_params": {"do_local_prefill": True}},
            },
        ),
        (("prompt",), {}),
    ]


def test_the_flag_is_accepted() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(None, parser)
    assert vars(parser.parse_args([FLAG])) == {"disaggregation_decode_enable_conditional_agg": True}
