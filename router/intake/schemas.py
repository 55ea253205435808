"""The fields of each endpoint's body that the router checks; all others pass as they came.

A file of its own, for mypyc compiles no structures of msgspec.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .inbound import Endpoint

MAX_SAMPLES = 128  # OpenAI's limit on ``n``


class CommonFields(msgspec.Struct):
    """Fields that all endpoints have.

    Attributes:
        model: a name that ``/v1/models`` lists, or ``default``. ``NAME:ADAPTER`` is a LoRA adapter.
        stream: whether the answer is a stream of events.
        user: names the conversation for the choice of a worker, if ``prompt_cache_key`` is absent.
        prompt_cache_key: names the conversation for the choice of a worker.
        stream_options: with ``include_usage``, a stream ends with an event that has the usage.
        custom_params: forwarded to the engine, without the router's own markers.
    """

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None
    custom_params: dict[str, Any] | None = None


class SampledFields(CommonFields):
    """Fields of the OpenAI endpoints.

    Attributes:
        n: how many replies are requested.
        best_of: must equal ``n``.
        logit_bias: biases by token id; each id must be in the vocabulary.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    logit_bias: dict[str, Any] | None = None


class MessageFields(msgspec.Struct, gc=False):
    """Fields of one message of a chat.

    Attributes:
        role: role of the author: ``user``, ``assistant``, ``system``, ``tool``.
        content: a text, or a list of parts.
    """

    role: str
    content: str | list[Any] | None = None


class ChatFields(SampledFields, kw_only=True):
    """Fields of ``/v1/chat/completions``.

    Attributes:
        messages: the whole conversation so far.
    """

    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1)]


class CompletionFields(SampledFields):
    """Fields of ``/v1/completions``."""


class GenerateFields(CommonFields):
    """Fields of ``/generate``.

    Attributes:
        sampling_params: SGLang's sampling parameters; a list has one object for each prompt.
    """

    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None


FIELDS: dict[Endpoint, type[CommonFields]] = {
    Endpoint.CHAT: ChatFields,
    Endpoint.COMPLETIONS: CompletionFields,
    Endpoint.GENERATE: GenerateFields,
}
