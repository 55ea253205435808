"""Client requests: what each endpoint accepts, and what is taken off before a worker sees it.

Parses and checks only what routing needs; the rest of a body is the engine's to judge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, assert_never

import orjson

from ppd.contract import FORBIDDEN_CUSTOM_PARAMS, FORBIDDEN_FIELDS
from ppd.errors import RequestError
from ppd.prefix import PrefixChain, hash_ids, hash_messages, hash_text


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


# The only client headers a worker sees: engines obey others (x-override-*,
# x-data-parallel-rank, x-smg-routing-key).
FORWARDED_HEADERS = ("Authorization", "X-Request-Id", "Traceparent", "Tracestate", "Baggage")

# Fields that change the prompt in front of the messages.
_PROMPT_FIELDS = (
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "lora_path",
    "cache_salt",
    "extra_key",
    "reasoning_effort",
)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A checked request.

    Attributes:
        body: what the workers get, less the routing fields.
        chain: prefixes of its input; None if it holds several prompts.
        prompts: how many prompts it holds.
        asks_usage: the client wants the usage event of a stream.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    stream: bool
    asks_usage: bool
    chain: PrefixChain | None
    prompts: int


def tenant_of(authorization: str | None) -> str:
    """A name for whoever holds this key, from which the key cannot be told; "" without one."""
    if not authorization:
        return ""
    return hashlib.blake2b(authorization.encode(), digest_size=8, person=b"ppd-tenant").hexdigest()


def parse(endpoint: Endpoint, raw: bytes, tenant: str, models: Sequence[str]) -> Inbound:
    """Check a request body.

    Raises:
        RequestError: naming the field at fault and what is allowed.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is no valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {_kind(body)}")
    _check_model(body, models)
    stream = _typed(body, "stream", bool, False)
    options = _typed(body, "stream_options", dict, {})
    body = _without_routing(body)
    _isolate(body, tenant)
    salt = _salt(endpoint, body, tenant, models)

    chain: PrefixChain | None
    prompts = 1
    match endpoint:
        case Endpoint.CHAT:
            _refuse_parallel(body, "n")
            chain = hash_messages(salt, _messages(body))
        case Endpoint.COMPLETIONS:
            _refuse_parallel(body, "n")
            _refuse_parallel(body, "best_of")
            chain, prompts = _prompt_chain(salt, body, "prompt")
        case Endpoint.GENERATE:
            sampling = _typed(body, "sampling_params", (dict, list), {})
            for params in sampling if isinstance(sampling, list) else [sampling]:
                _refuse_parallel(params, "n")
            names = [name for name in ("text", "input_ids") if body.get(name) is not None]
            if len(names) != 1:
                raise RequestError("give one of text and input_ids", param="text")
            chain, prompts = _prompt_chain(salt, body, names[0])
        case _:
            assert_never(endpoint)
    if stream and endpoint is not Endpoint.GENERATE:
        body["stream_options"] = {**options, "include_usage": True}
    return Inbound(
        endpoint=endpoint,
        body=body,
        stream=stream,
        asks_usage=bool(options.get("include_usage")),
        chain=chain,
        prompts=prompts,
    )


def _check_model(body: Mapping[str, Any], models: Sequence[str]) -> None:
    model = _typed(body, "model", str, "default")
    # "default" is SGLang's name for whatever is served; "base:adapter" names a LoRA adapter.
    if model != "default" and model not in models and model.rpartition(":")[0] not in models:
        raise RequestError(
            f"the model {model!r} does not exist; available: {', '.join(models)}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _without_routing(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without what would aim KV transfers or pass for the router's own marks."""
    body = {name: value for name, value in body.items() if name not in FORBIDDEN_FIELDS}
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        body["sampling_params"] = _without_marks(sampling)
    elif isinstance(sampling, list):
        body["sampling_params"] = [
            _without_marks(p) if isinstance(p, dict) else p for p in sampling
        ]
    return _without_marks(body)


def _without_marks(params: dict[str, Any]) -> dict[str, Any]:
    custom = params.get("custom_params")
    if not isinstance(custom, dict) or not FORBIDDEN_CUSTOM_PARAMS & custom.keys():
        return params
    kept = {name: value for name, value in custom.items() if name not in FORBIDDEN_CUSTOM_PARAMS}
    return {**params, "custom_params": kept or None}


def _isolate(body: dict[str, Any], tenant: str) -> None:
    """Keep tenants out of each other's cache and request ids."""
    if not tenant:
        return
    salt = body.get("cache_salt")
    if isinstance(salt, list):
        body["cache_salt"] = [f"{tenant}/{one or ''}" for one in salt]
    else:
        body["cache_salt"] = f"{tenant}/{salt}" if salt else tenant
    rid = body.get("rid")
    if isinstance(rid, list):
        body["rid"] = [f"{tenant}-{one}" for one in rid]
    elif rid is not None:
        body["rid"] = f"{tenant}-{rid}"


def _salt(endpoint: Endpoint, body: Mapping[str, Any], tenant: str, models: Sequence[str]) -> bytes:
    model = body.get("model")
    served = models[0] if model in (None, "default") else model
    before = {name: body[name] for name in _PROMPT_FIELDS if body.get(name) is not None}
    kind = "chat" if endpoint is Endpoint.CHAT else "prompt"
    return orjson.dumps([kind, tenant, served, before], option=orjson.OPT_SORT_KEYS)


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, got {_kind(messages)}", param="messages")
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object, got {_kind(message)}", param=where)
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise RequestError(
                f"{where}.content must be a string or a list of parts, got {_kind(content)}",
                param=f"{where}.content",
            )
    return messages


def _prompt_chain(
    salt: bytes, body: Mapping[str, Any], name: str
) -> tuple[PrefixChain | None, int]:
    """Chain and count of a prompt: a text, a list of ids, or a list of either."""
    prompt = body.get(name)
    match prompt:
        case str() if prompt and name != "input_ids":
            return hash_text(salt, prompt), 1
        case [int(), *_] if name != "text":
            try:
                return hash_ids(salt, prompt), 1
            except (OverflowError, TypeError) as error:
                raise RequestError(
                    f"{name} must hold token ids, integers of 0 or more: {error}", param=name
                ) from error
        case [str() | list(), *_] if all(type(one) is type(prompt[0]) and one for one in prompt):
            return None, len(prompt)
        case _:
            allowed = {
                "prompt": "a text, a list of token ids, or a list of either",
                "text": "a text or a list of texts",
                "input_ids": "a list of token ids, or a list of such lists",
            }[name]
            raise RequestError(f"{name} must be {allowed}, and not empty", param=name)


def _refuse_parallel(params: Mapping[str, Any], name: str) -> None:
    value = _typed(params, name, int, 1)
    if value != 1:
        raise RequestError(
            f"{name} must be 1, got {value}: SGLang 0.5.21 does not finish parallel samples "
            "between prefill and decode workers",
            param=name,
        )


def _typed(params: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        allowed = " or ".join(_NAMES[k] for k in kinds)
        raise RequestError(f"{name} must be {allowed}, got {_kind(value)}", param=name)
    return value


_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _NAMES[type(value)]
