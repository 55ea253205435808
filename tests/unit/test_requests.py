"""What a client may send, and what a worker gets of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from ppd.contract import STRIPPED_FIELDS
from ppd.errors import RequestError
from router.intake.inbound import Endpoint, Inbound, Served
from router.intake.requests import parse
from router.intake.scrub import tenant_of

SERVED = Served(("m",), vocab_size=100)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def deep(levels: int) -> Any:
    """Nested lists, as raw JSON: orjson does not write them so deep."""
    return orjson.Fragment(b"[" * levels + b"]" * levels)


def read(endpoint: Endpoint, body: object, tenant: str = "") -> Inbound:
    return parse(endpoint, orjson.dumps(body), tenant, SERVED)


def sent(inbound: Inbound) -> dict[str, Any]:
    """What a worker gets, which is the same whether it is appended to or written anew."""
    body: dict[str, Any] = orjson.loads(inbound.with_fields({}))
    assert body == inbound.fields
    more = orjson.loads(inbound.with_fields({"bootstrap_room": 1}))
    assert more == {**body, "bootstrap_room": 1}
    return body


def test_a_model_of_null_is_none() -> None:
    assert "model" not in sent(read(Endpoint.CHAT, {**CHAT, "model": None}))


@pytest.mark.parametrize("name", sorted(STRIPPED_FIELDS))
def test_routing_fields_never_pass(name: str) -> None:
    for value in (1, None):
        assert name not in sent(read(Endpoint.CHAT, {**CHAT, name: value}))


def test_marks_never_pass() -> None:
    marks = {"do_local_prefill": True, "min_cached_tokens": 0, "mine": 1}
    body = sent(read(Endpoint.CHAT, {**CHAT, "custom_params": marks}))
    assert body["custom_params"] == {"mine": 1}
    native = {"text": "hi", "sampling_params": {"custom_params": marks, "temperature": 0}}
    sampling = sent(read(Endpoint.GENERATE, native))["sampling_params"]
    assert sampling == {"custom_params": {"mine": 1}, "temperature": 0}
    batch = {"text": ["a", "b"], "sampling_params": [{"custom_params": marks}] * 2}
    assert (
        sent(read(Endpoint.GENERATE, batch))["sampling_params"]
        == [{"custom_params": {"mine": 1}}] * 2
    )


def test_tenants_have_their_own_cache_and_ids() -> None:
    body = sent(read(Endpoint.CHAT, {**CHAT, "rid": "r", "cache_salt": "s"}, "t"))
    assert (body["rid"], body["cache_salt"]) == ("t/r/", "t/s")
    assert "cache_salt" not in sent(read(Endpoint.CHAT, CHAT))
    posing = sent(read(Endpoint.CHAT, {**CHAT, "cache_salt": "t"}))
    assert posing["cache_salt"] == "anonymous/t"
    one, two = tenant_of("Bearer one"), tenant_of("Bearer two")
    assert one != two
    assert "one" not in one
    assert tenant_of(None) == ""
    assert tenant_of("Bearer \udcff")


def test_what_stands_before_the_messages_separates_conversations() -> None:
    def end(**more: Any) -> bytes:
        chain = read(Endpoint.CHAT, {**CHAT, **more}).chain
        assert chain is not None
        return chain.end

    tool = {"type": "function", "function": {"name": "f"}}
    assert end() != end(tools=[tool]) != end(chat_template_kwargs={"x": 1})
    assert end() == end(temperature=0.5, max_tokens=9)
    assert end() != end(reasoning={"effort": "high"})
    assert end() != end(thinking={"type": "adaptive"}) != end(task="query")
    assert end() != end(messages=[{"role": "user", "content": "hi", "tools": [tool]}])


def test_tools_are_text_of_the_prompt() -> None:
    """Their tokens are in the usage. Divided by the messages' bytes alone they were too many."""
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 10_000}}
    plain, chain = (
        read(Endpoint.CHAT, CHAT).chain,
        read(Endpoint.CHAT, {**CHAT, "tools": [tool]}).chain,
    )
    assert plain is not None
    assert chain is not None
    assert 10_000 < chain.total_bytes - plain.total_bytes < 10_200


def test_ids_beside_the_messages_are_the_prompt() -> None:
    one = read(Endpoint.CHAT, {**CHAT, "input_ids": [1, 2, 3]}).chain
    more = read(Endpoint.CHAT, {**CHAT, "input_ids": [1, 2, 3, 4]}).chain
    assert one is not None
    assert more is not None
    assert one.total_bytes == 12
    assert one.end in {candidate.digest for candidate in more.candidates(lambda _: [12])}
    assert read(Endpoint.CHAT, {**CHAT, "input_ids": [1]}).kind == "ids"
    assert read(Endpoint.CHAT, CHAT).kind == Endpoint.CHAT
    with pytest.raises(RequestError, match="input_ids"):
        read(Endpoint.CHAT, {**CHAT, "input_ids": [1, 1000]})
    nested = {"messages": [{"role": "user", "content": deep(400)}], "input_ids": [1]}
    with pytest.raises(RequestError, match="cannot be forwarded"):
        read(Endpoint.CHAT, nested)


@pytest.mark.parametrize("stream_options", [None, {"include_usage": False}])
def test_the_router_always_asks_for_usage(stream_options: object) -> None:
    inbound = read(Endpoint.CHAT, {**CHAT, "stream": True, "stream_options": stream_options})
    assert sent(inbound)["stream_options"] == {"include_usage": True}
    assert not inbound.asks_usage


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "named"),
    [
        (Endpoint.CHAT, [], 400, "must be a JSON object, got a list"),
        (Endpoint.CHAT, {"model": "m"}, 400, "messages is missing"),
        (Endpoint.CHAT, {**CHAT, "messages": []}, 400, "messages is empty"),
        (Endpoint.CHAT, {**CHAT, "messages": ["x"]}, 400, r"messages\[0\] must be an object"),
        (Endpoint.CHAT, {**CHAT, "messages": [{}]}, 400, r"messages\[0\].role is missing"),
        (
            Endpoint.CHAT,
            {**CHAT, "messages": [{"role": "user", "content": 3}]},
            400,
            r"messages\[0\].content must be a string or a list, got an integer",
        ),
        (Endpoint.CHAT, {**CHAT, "model": "other"}, 404, "'other' does not exist; available: m"),
        (Endpoint.CHAT, {**CHAT, "model": 7}, 400, "model must be a string, got an integer"),
        (Endpoint.CHAT, {**CHAT, "stream": "yes"}, 400, "stream must be a boolean"),
        (Endpoint.CHAT, {**CHAT, "n": 129}, 400, "n must be at most 128, got 129"),
        (Endpoint.CHAT, {**CHAT, "n": 1, "best_of": 2}, 400, "best_of must be n, got 2"),
        (Endpoint.COMPLETIONS, {"model": "m"}, 400, "prompt must be a text"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": ""}, 400, "not empty"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": ["a", 1]}, 400, "prompt must be"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": [1, "a"]}, 400, "token ids"),
        (Endpoint.GENERATE, {}, 400, "give one of text and input_ids"),
        (Endpoint.GENERATE, {"text": "a", "input_ids": [1]}, 400, "give one of"),
        (Endpoint.GENERATE, {"input_ids": [-1]}, 400, "input_ids must hold token ids"),
        (Endpoint.GENERATE, {"input_ids": "a"}, 400, "input_ids must be a list of token ids"),
        (Endpoint.GENERATE, {"text": "a", "sampling_params": 1}, 400, "an object or a list"),
        (Endpoint.GENERATE, {"text": "a", "sampling_params": [1]}, 400, r"params\[0\] must be an"),
        (Endpoint.GENERATE, {"text": "a", "sampling_params": [{}, {}]}, 400, "2 entries for one"),
        (Endpoint.GENERATE, {"input_ids": [5, 100]}, 400, "token ids from 0 to 99"),
        (Endpoint.GENERATE, {"input_ids": [[5], [100]]}, 400, "token ids from 0 to 99"),
        (
            Endpoint.GENERATE,
            {"text": "a", "sampling_params": {"stop_token_ids": [100]}},
            400,
            "stop_token_ids must hold token ids from 0 to 99",
        ),
        (Endpoint.CHAT, {**CHAT, "stop_token_ids": [-1]}, 400, "stop_token_ids must hold"),
        (Endpoint.CHAT, {**CHAT, "top_logprobs": 101}, 400, "top_logprobs must be at most 100"),
        (Endpoint.COMPLETIONS, {"prompt": "a", "logprobs": 101}, 400, "logprobs must be at most"),
        (Endpoint.GENERATE, {"text": "a", "top_logprobs_num": [101]}, 400, "at most 100"),
        (Endpoint.GENERATE, {"text": "a", "token_ids_logprob": [100]}, 400, "from 0 to 99"),
        (Endpoint.CHAT, {**CHAT, "top_logprobs": 1e9}, 400, "top_logprobs must be at most 100"),
        (Endpoint.CHAT, {**CHAT, "top_logprobs": "999"}, 400, "top_logprobs must be at most 100"),
        (Endpoint.CHAT, {**CHAT, "stop_token_ids": ["999"]}, 400, "stop_token_ids must hold"),
        (Endpoint.CHAT, {**CHAT, "input_ids": [1, "999"]}, 400, "input_ids must hold token ids"),
        (Endpoint.COMPLETIONS, {"prompt": [[1, "999"]]}, 400, "prompt must hold token ids"),
        (Endpoint.GENERATE, {"text": "a", "top_logprobs_num": 1e9}, 400, "at most 100"),
        (Endpoint.CHAT, {**CHAT, "logit_bias": {"100": 1}}, 400, "keyed by token ids from 0 to 99"),
        (Endpoint.CHAT, {**CHAT, "logit_bias": {"x": 1}}, 400, "keyed by token ids"),
        (Endpoint.CHAT, {**CHAT, "custom_params": "x"}, 400, "custom_params must be an object"),
        (Endpoint.CHAT, {**CHAT, "tools": deep(300)}, 400, "cannot be forwarded"),
    ],
)
def test_bad_requests_are_named(endpoint: Endpoint, body: object, status: int, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        read(endpoint, body)
    assert caught.value.status == status


def test_bad_json_is_named() -> None:
    with pytest.raises(RequestError, match="no valid JSON"):
        parse(Endpoint.CHAT, b'{"model": ', "", SERVED)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2, 3]]])
def test_several_prompts_have_no_chain(prompt: object) -> None:
    inbound = read(Endpoint.COMPLETIONS, {"model": "m", "prompt": prompt})
    assert (inbound.chain, inbound.prompts) == (None, 2)


@pytest.mark.parametrize("model", ["default", "m", "m:adapter"])
def test_served_names(model: str) -> None:
    assert read(Endpoint.CHAT, {**CHAT, "model": model}).chain is not None


def test_what_is_in_the_vocabulary_passes() -> None:
    fields = {"logprobs": True, "top_logprobs": 100, "logit_bias": {"99": -100}}
    assert read(Endpoint.CHAT, {**CHAT, **fields, "stop_token_ids": [0, 99]}).chain is not None
    assert read(Endpoint.COMPLETIONS, {"prompt": [[1], [99]], "logprobs": 5}).prompts == 2


def test_one_set_of_sampling_params_may_come_in_a_list() -> None:
    inbound = read(Endpoint.GENERATE, {"text": "a", "sampling_params": [{"temperature": 0}]})
    assert sent(inbound)["sampling_params"] == {"temperature": 0}
