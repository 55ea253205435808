"""A client's request once it has been checked, and the bodies that are made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import orjson
from xxhash import xxh3_128_digest

from ppd.errors import RequestError
from ppd.media import Media
from ppd.prefix import BlockChain, PrefixChain


class Endpoint(StrEnum):
    """The endpoints that are served by a plan of workers."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


class Served(msgspec.Struct, frozen=True):
    """What the workers of one model serve.

    Attributes:
        models: names that clients may use, the model's own first.
        vocab_size: None if no worker reports it.
    """

    models: Sequence[str]
    vocab_size: int | None = None

    def of(self, model: object) -> Served:
        """What they serve for a request that names ``model``.

        Raises:
            RequestError: no such model is served.
        """
        check_model(model, self.models)
        return self


def check_model(model: object, models: Sequence[str]) -> None:
    """Check the model that a request names, if it names one.

    Args:
        model: the field of the request.
        models: names that clients may use.

    Raises:
        RequestError: no such model is served.
    """
    # "default" is SGLang's name for whatever is served; "base:adapter" names a LoRA adapter.
    if not isinstance(model, str) or model == "default":
        return
    if model not in models and model.rpartition(":")[0] not in models:
        raise unknown_model(model, models)


def unknown_model(model: str, models: Iterable[str]) -> RequestError:
    """The error of a request for a model that is not served.

    Args:
        model: that it names.
        models: names that clients may use.
    """
    return RequestError(
        f"the model {model!r} does not exist; available: {', '.join(models)}",
        status=404,
        param="model",
        code="model_not_found",
    )


class Offer(Protocol):
    """What may be named by requests: one model, or several."""

    def of(self, model: object) -> Served:
        """What the workers serve for a request that names ``model``; see ``Served.of``."""
        ...


class Inbound(msgspec.Struct, frozen=True):
    """A checked request.

    Attributes:
        model: the served model's own name.
        fields: what the workers get, less the routing fields.
        opened: the same as JSON, but for the closing brace: the client's own bytes where nothing
            had to be taken off them.
        chain: prefixes of its input; None if it holds several prompts.
        prompts: how many prompts it holds.
        samples: how many replies are asked for (``serving/samples.py``).
        hint: the sender's name for the conversation; b"" if there is none.
        asks_usage: the client asks for the usage event of a stream.
        max_reply_tokens: limit on the reply; SGLang's default where the request has none.
        media: images, audio and video of its prompts.
    """

    endpoint: Endpoint
    model: str
    fields: dict[str, Any]
    opened: bytes
    stream: bool
    asks_usage: bool
    chain: PrefixChain | None
    prompts: int
    samples: int
    hint: bytes
    max_reply_tokens: int | None
    media: tuple[Media, ...] = ()

    @property
    def root(self) -> bytes | None:
        """What placement hashes: the same on every router; None for several prompts.

        A hint only chooses the worker: what may be read there depends on the tenant's salt.
        """
        if self.chain is None:
            return None
        return xxh3_128_digest(self.hint) if self.hint else self.chain.root

    @property
    def kind(self) -> str:
        """The kind of prompt, of which each has tokens per byte of its own (``ppd.forecast``)."""
        by_ids = isinstance(self.chain, BlockChain) and self.chain.holds_ids
        return "ids" if by_ids else self.endpoint

    def with_fields(self, extra: Mapping[str, Any]) -> bytes:
        """The body of a leg: the client's, and some fields more."""
        if not extra:
            return self.opened + b"}"
        if not self.fields.keys().isdisjoint(extra):
            return orjson.dumps({**self.fields, **extra})
        return b"%b,%b" % (self.opened, orjson.dumps(extra)[1:])
