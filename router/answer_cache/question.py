"""The question of a chat request, and all else that must be equal for it to have one answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ppd.errors import RequestError

from ..config.answer_cache import AnswerCacheConfig, CacheOptions
from ..intake.fields import kind_of

FIELD = "answer_cache"
# Fields without influence on the text of the answer; the messages are compared separately.
_IGNORED_FIELDS = (FIELD, "stream", "stream_options", "user", "metadata", "store", "messages")
# Fields that ask for more than one text.
_UNSUPPORTED_FIELDS = ("tools", "functions", "logprobs", "top_logprobs", "modalities", "audio")


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a chat request.

    Attributes:
        text: of the last message.
        scope: digest of the tenant, the model, the earlier messages and all options. Questions of
            different scopes have different answers.
        model: the model that the request names.
        streams: whether the answer is streamed.
        wants_usage: whether the stream ends with the usage.
        threshold: minimum cosine of this question and a stored one.
        ttl_s: lifetime of the answer in the cache.
    """

    text: str
    scope: str
    model: str
    streams: bool
    wants_usage: bool
    threshold: float
    ttl_s: float


def read(
    given: Mapping[str, Any], tenant: str, config: AnswerCacheConfig
) -> tuple[Question | None, dict[str, Any]]:
    """Read the question of a chat request.

    Args:
        given: the fields of the body.
        tenant: the client's tenant.
        config: of the cache.

    Returns:
        The question, and the body without the ``answer_cache`` object. The question is None if the
        answer must not come from the cache.

    Raises:
        RequestError: the ``answer_cache`` object is malformed.
    """
    cache_options = _options(given.get(FIELD, config.always))
    fields = {name: value for name, value in given.items() if name != FIELD}
    if cache_options is None:
        return None, fields
    text = _question_text(fields)
    if text is None or len(text) > config.max_characters:
        return None, fields
    *earlier, last = fields["messages"]
    options = {name: value for name, value in fields.items() if name not in _IGNORED_FIELDS}
    scope = [tenant, options, earlier, {**last, "content": None}]
    try:
        encoded = orjson.dumps(scope, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # nested too deeply; the request handler refuses the request
        return None, fields
    stream_options = fields.get("stream_options")
    wants_usage = isinstance(stream_options, dict) and stream_options.get("include_usage") is True
    ttl_s = config.ttl_s
    if cache_options.ttl_s is not None:
        ttl_s = min(cache_options.ttl_s, ttl_s)
    question = Question(
        text=text,
        # A cryptographic hash, so that no client can construct the scope of another one.
        scope=hashlib.sha256(encoded).hexdigest(),
        model=str(fields.get("model", "")),
        streams=fields.get("stream") is True,
        wants_usage=wants_usage,
        threshold=(
            config.threshold if cache_options.threshold is None else cache_options.threshold
        ),
        ttl_s=ttl_s,
    )
    return question, fields


def asking_usage(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body whose stream shall end with the usage."""
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):  # the engine refuses it
        return dict(fields)
    return {**fields, "stream_options": {**options, "include_usage": True}}


def _options(value: Any) -> CacheOptions | None:
    """The options of an ``answer_cache`` object or boolean; None if the cache is not used."""
    if value is None or value is False:
        return None
    if value is True:
        return CacheOptions()
    if not isinstance(value, dict):
        raise RequestError(
            f"{FIELD} must be an object, a boolean or null, got {kind_of(value)}", param=FIELD
        )
    try:
        options = msgspec.convert(value, CacheOptions)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from error
    if problems := list(options.problems()):
        raise RequestError(f"{FIELD}: {'; '.join(problems)}", param=FIELD)
    return options


def _question_text(fields: Mapping[str, Any]) -> str | None:
    """The text of a user's turn; None if its answer may be more than one text."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    if fields.get("n") not in (None, 1) or any(fields.get(name) for name in _UNSUPPORTED_FIELDS):
        return None
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    text = last.get("content")
    return text if isinstance(text, str) and text.strip() else None
