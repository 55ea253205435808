"""What of a chat request is the question, and what all that must be the same for its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ppd.errors import RequestError

from ..config.answer_cache import AnswerCacheConfig, CacheWish
from ..intake.fields import kind_of

FIELD = "answer_cache"
# What says how an answer is sent, or who asks, and not what it is.
_ASIDE = (FIELD, "stream", "stream_options", "user", "metadata", "store", "messages")
# What asks for more than one plain text.
_MORE = ("tools", "functions", "logprobs", "top_logprobs", "modalities", "audio")


@dataclass(frozen=True, slots=True)
class Question:
    """
    Attributes:
        scope: digest of tenant, model, earlier messages and all options: where it differs there is
            another answer.
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
    """The question, if its answer may come from the cache, and the request without the wish.

    Raises:
        RequestError: the wish is wrong.
    """
    wish = _wish(given.get(FIELD, config.always))
    fields = {name: value for name, value in given.items() if name != FIELD}
    if wish is None:
        return None, fields
    text = _asked(fields)
    if text is None or len(text) > config.max_characters:
        return None, fields
    *before, last = fields["messages"]
    beside = {name: value for name, value in fields.items() if name not in _ASIDE}
    same = [tenant, beside, before, {**last, "content": None}]
    try:
        written = orjson.dumps(same, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # nested deeper than can be written; not ours to complain
        return None, fields
    options = fields.get("stream_options")
    question = Question(
        text=text,
        # Cryptographic: nobody shall be able to make his scope another one's.
        scope=hashlib.sha256(written).hexdigest(),
        model=str(fields.get("model", "")),
        streams=fields.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        threshold=config.threshold if wish.threshold is None else wish.threshold,
        ttl_s=config.ttl_s if wish.ttl_s is None else min(wish.ttl_s, config.ttl_s),
    )
    return question, fields


def _wish(said: Any) -> CacheWish | None:
    if said is None or said is False:
        return None
    if said is True:
        return CacheWish()
    if not isinstance(said, dict):
        raise RequestError(
            f"{FIELD} must be an object, a boolean or null, got {kind_of(said)}", param=FIELD
        )
    try:
        wish = msgspec.convert(said, CacheWish)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from error
    if problems := list(wish.problems()):
        raise RequestError(f"{FIELD}: {'; '.join(problems)}", param=FIELD)
    return wish


def _asked(fields: Mapping[str, Any]) -> str | None:
    """The plain text of a user's turn that one plain text answers; None: it is not so simple."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    if fields.get("n") not in (None, 1) or any(fields.get(name) for name in _MORE):
        return None
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    text = last.get("content")
    return text if isinstance(text, str) and text.strip() else None
