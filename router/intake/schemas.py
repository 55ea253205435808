"""The fields of each endpoint's body that the router checks; all others pass as they came.

A file of its own, for mypyc compiles no structures of msgspec.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .inbound import Endpoint

MAX_SAMPLES = 128  # OpenAI's limit on ``n``


class CommonFields(msgspec.Struct):
    """Fields that all endpoints have."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None
    custom_params: dict[str, Any] | None = None


class SampledFields(CommonFields):
    """Fields of the OpenAI endpoints."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    logit_bias: dict[str, Any] | None = None


class MessageFields(msgspec.Struct, gc=False):
    """Fields of one message of a chat."""

    role: str
    content: str | list[Any] | None = None


class ChatFields(SampledFields, kw_only=True):
    """Fields of ``/v1/chat/completions``."""

    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1)]


class CompletionFields(SampledFields):
    """Fields of ``/v1/completions``."""


class GenerateFields(CommonFields):
    """Fields of ``/generate``."""

    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None


FIELDS: dict[Endpoint, type[CommonFields]] = {
    Endpoint.CHAT: ChatFields,
    Endpoint.COMPLETIONS: CompletionFields,
    Endpoint.GENERATE: GenerateFields,
}
