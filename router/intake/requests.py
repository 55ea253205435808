"""Client requests: read, checked and rewritten once, in one typed structure an endpoint.

Only what routing needs is checked; the rest of a body is the engine's to judge, and passes as it
came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, assert_never

import orjson

from ppd.errors import RequestError
from ppd.media import MEDIA_FIELDS, Media, in_fields
from ppd.prefix import MessageChain, PrefixChain, hash_ids, hash_messages, hash_text

from ..workers.sglang import (
    COMPLETION_MAX_TOKENS,
    GENERATE_MAX_TOKENS,
    NO_PARALLEL_SAMPLES,
    RANK_FIELDS,
    TOKEN_ID_FIELDS,
)
from .fields import checked, kind_of, sampling_of, typed
from .inbound import Endpoint, Inbound, Offer
from .schemas import FIELDS, CommonFields, SampledFields
from .scrub import isolate, without_routing

_CHAT: Final = Endpoint.CHAT  # an enum's attribute is slow to look up (Python 3.11)
_DEPTH = 254  # orjson's limit in writing
_MORE_DEPTH = 4  # of what is put around it
_NESTS = (dict, list)

# Fields that change the prompt in front of the messages.
_PROMPT_FIELDS = {
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "lora_path",
    "cache_salt",
    "extra_key",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "task",
    "continue_final_message",
}


# -- one request ----------------------------------------------------------------------------


def parse(endpoint: Endpoint, raw: bytes, tenant: str, offer: Offer, session: str = "") -> Inbound:
    """Read, check and rewrite a request body.

    Args:
        endpoint: that it was sent to.
        raw: the body.
        tenant: its sender; "" without a key.
        offer: the models that may be named.
        session: the sender's name for the conversation, beside the body.

    Raises:
        RequestError: naming the field at fault and what is allowed.
    """
    given = json_object(raw)
    served = offer.of(given.get("model"))
    fields = checked(given, FIELDS[endpoint])
    body = without_routing(given)
    if endpoint is not Endpoint.GENERATE and body.get("model") in served.models[1:]:
        # SGLang finds an adapter by this form alone, and takes any other name for the model's own.
        body["model"] = f"{served.models[0]}:{body['model']}"
    isolate(body, tenant)
    _check_vocabulary(body, served.vocab_size)
    try:
        salt = _salt(endpoint, body, tenant, served.models)
        chain, prompts, media = _chain(endpoint, salt, body)
        stream, options = bool(fields.stream), fields.stream_options or {}
        if stream and endpoint is not Endpoint.GENERATE:
            body["stream_options"] = {**options, "include_usage": True}
        hashed = "messages" if isinstance(chain, MessageChain) else None
        opened = _opened(raw, given, body, hashed)
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise RequestError(f"the body cannot be forwarded: {error}") from error
    name = session or fields.prompt_cache_key or fields.user or ""
    return Inbound(
        endpoint=endpoint,
        model=served.models[0],
        fields=body,
        opened=opened,
        stream=stream,
        asks_usage=bool(options.get("include_usage")),
        chain=chain,
        prompts=prompts,
        samples=_samples(fields),
        hint=f"{tenant}/{name}".encode(errors="surrogatepass") if name else b"",
        max_reply_tokens=_max_reply_tokens(endpoint, body),
        media=media,
    )


def _chain(
    endpoint: Endpoint, salt: bytes, body: dict[str, Any]
) -> tuple[PrefixChain | None, int, tuple[Media, ...]]:
    """Chain, count and media of a request's prompts; several have no chain."""
    if endpoint is _CHAT:
        if body.get("input_ids") is not None:  # the engine takes them for the rendered messages
            return *_prompt_chain(salt, body, "input_ids"), ()
        chain = hash_messages(salt, body["messages"], len(salt) if body.get("tools") else 0)
        return chain, 1, chain.media
    match endpoint:
        case Endpoint.COMPLETIONS:
            return *_prompt_chain(salt, body, "prompt"), ()
        case Endpoint.GENERATE:
            for params in sampling_of(body):
                _refuse_parallel(params)
            names = [name for name in ("text", "input_ids") if body.get(name) is not None]
            if len(names) != 1:
                raise RequestError("give one of text and input_ids", param="text")
            media: tuple[Media, ...] = ()
            if not MEDIA_FIELDS.isdisjoint(body):
                media, digest = in_fields(body)
                salt += digest if media else b""  # they stand anywhere in the prompt
            of_prompt, prompts = _prompt_chain(salt, body, names[0])
            if of_prompt is not None:
                _unwrap_sampling(body)
            return of_prompt, prompts, media
        case _:
            assert_never(endpoint)


def _samples(fields: CommonFields) -> int:
    """How many replies are asked for."""
    if not isinstance(fields, SampledFields):
        return 1
    count = 1 if fields.n is None else fields.n
    if fields.best_of not in (None, count):
        message = f"best_of must be n, got {fields.best_of}: samples are not chosen among"
        raise RequestError(message, param="best_of")
    return count


def _opened(
    raw: bytes, given: Mapping[str, Any], fields: Mapping[str, Any], hashed: str | None
) -> bytes:
    """``fields`` as JSON without its closing brace; ``raw``'s bytes if it only gained some.

    Args:
        raw: the client's body.
        given: its JSON.
        fields: what the workers get.
        hashed: a field that has been written already, to be hashed.

    Raises:
        orjson.JSONEncodeError: it is nested more deeply than a worker should have to read.
    """
    if not given.items() <= fields.items():  # what is untouched is the same object
        return orjson.dumps(fields)[:-1]
    nested = [v for name, v in given.items() if type(v) in _NESTS and name != hashed]
    if nested and _may_be_deep(raw):
        orjson.dumps(nested)
    opened = raw.strip()[:-1]
    gained = {name: value for name, value in fields.items() if name not in given}
    return b"%b,%b" % (opened, orjson.dumps(gained)[1:-1]) if gained else opened


def _max_reply_tokens(endpoint: Endpoint, body: Mapping[str, Any]) -> int | None:
    """The limit on a reply; whether it is a sensible one the engine judges."""
    default: int | None = None
    if endpoint is _CHAT:
        given = body.get("max_completion_tokens") or body.get("max_tokens")
    elif endpoint is Endpoint.COMPLETIONS:
        given, default = body.get("max_tokens"), COMPLETION_MAX_TOKENS
    else:
        given, default = sampling_of(body)[0].get("max_new_tokens"), GENERATE_MAX_TOKENS
    return given if type(given) is int and given > 0 else default


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


def _unwrap_sampling(body: dict[str, Any]) -> None:
    """One prompt has one set of sampling parameters, also if they come in a list."""
    several = sampling_of(body)
    if len(several) != 1:
        raise RequestError(
            f"sampling_params has {len(several)} entries for one prompt", param="sampling_params"
        )
    if "sampling_params" in body:
        body["sampling_params"] = several[0]


def _refuse_parallel(sampling: Mapping[str, Any]) -> None:
    value = typed(sampling, "n", int, 1)
    if value != 1:
        raise RequestError(
            f"n must be 1, got {value}: {NO_PARALLEL_SAMPLES}; /v1/chat/completions and "
            "/v1/completions serve several",
            param="n",
        )


# -- what lies outside the vocabulary -------------------------------------------------------

_LOOKED_UP = {*TOKEN_ID_FIELDS, *RANK_FIELDS, "logit_bias"}
_MAY_LOOK_UP = {*_LOOKED_UP, "sampling_params"}


def _check_vocabulary(body: Mapping[str, Any], vocab_size: int | None) -> None:
    """Refuse what lies outside the vocabulary."""
    if vocab_size is None or _MAY_LOOK_UP.isdisjoint(body):
        return
    for fields in (body, *sampling_of(body)):
        if _LOOKED_UP.isdisjoint(fields):
            continue
        for name in TOKEN_ID_FIELDS:
            ids = _numbers(fields.get(name), texts=name == "prompt")
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                raise RequestError(
                    f"{name} must hold token ids from 0 to {vocab_size - 1}", param=name
                )
        for name in RANK_FIELDS:
            if max(_numbers(fields.get(name)), default=0) > vocab_size:
                raise RequestError(f"{name} must be at most {vocab_size}", param=name)
        biased = typed(fields, "logit_bias", dict, {})
        if not all(_is_id(key, vocab_size) for key in biased):
            raise RequestError(
                f"logit_bias must be keyed by token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
            )


def _is_id(key: str, vocab_size: int) -> bool:
    """Whether a JSON key is a token id (a short one: long ones cost ``int`` quadratic time)."""
    return key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size


def _numbers(value: Any, *, texts: bool = False) -> list[float]:
    """The numbers of a field: alone, in a list, or in a list of lists.

    SGLang takes floats and strings such as ``1e9`` and ``"1000000000"`` for integers, too.

    Args:
        value: of the field.
        texts: strings that are not in an inner list are texts.
    """
    outer = value if isinstance(value, list) else [value]
    if all(type(one) is int for one in outer):
        return outer
    inner = [one for ids in outer if isinstance(ids, list) for one in ids]
    inner += [one for one in outer if not (isinstance(one, list) or (texts and type(one) is str))]
    return [number for one in inner if (number := _number(one)) is not None]


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:  # the engine refuses it
        return None


def _salt(endpoint: Endpoint, body: Mapping[str, Any], tenant: str, models: Sequence[str]) -> bytes:
    model = body.get("model")
    served = models[0] if model in (None, "default") else model
    kind = "chat" if endpoint is _CHAT else "prompt"
    if _PROMPT_FIELDS.isdisjoint(body):
        return _plain_salt(kind, tenant, str(served), None)
    given = _PROMPT_FIELDS.intersection(body)
    if len(given) == 1 and type(cache_salt := body.get("cache_salt")) is str:
        return _plain_salt(kind, tenant, str(served), cache_salt)
    before = {name: body[name] for name in given if body[name] is not None}
    return orjson.dumps([kind, tenant, served, before], option=orjson.OPT_SORT_KEYS)


@lru_cache(maxsize=1024)
def _plain_salt(kind: str, tenant: str, served: str, cache_salt: str | None) -> bytes:
    """Of requests that put nothing before their messages, which are most."""
    before = {} if cache_salt is None else {"cache_salt": cache_salt}
    return orjson.dumps([kind, tenant, served, before])


# -- JSON -------------------------------------------------------------------------------------


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises:
        RequestError: it is no JSON object.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is no valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {kind_of(body)}")
    return body


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """Write a body.

    Raises:
        RequestError: it is nested too deeply, for orjson reads deeper nesting than it writes.
    """
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"the body is nested too deeply: {error}") from error


def check_depth(raw: bytes, shown: Mapping[str, Any]) -> None:
    """Check that what is made of a body can be written later.

    Args:
        raw: the body.
        shown: made of it.

    Raises:
        RequestError: it is nested too deeply.
    """
    if _may_be_deep(raw):
        json_bytes(shown)


def _may_be_deep(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") > _DEPTH - _MORE_DEPTH
