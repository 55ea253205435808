"""A client's request once it has been checked, and the bodies that are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import orjson
from xxhash import xxh3_128_digest

from ppd.media import Media
from ppd.prefix import PrefixChain


class Endpoint(StrEnum):
    """The endpoints that are served by a plan of workers."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


class Served(msgspec.Struct, frozen=True):
    """What the workers serve.

    Attributes:
        models: names that clients may use.
        vocab_size: None if no worker reports it.
    """

    models: Sequence[str]
    vocab_size: int | None = None


class Inbound(msgspec.Struct, frozen=True):
    """A checked request.

    Attributes:
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

    def with_fields(self, extra: Mapping[str, Any]) -> bytes:
        """The body of a leg: the client's, and some fields more."""
        if not extra:
            return self.opened + b"}"
        if not self.fields.keys().isdisjoint(extra):
            return orjson.dumps({**self.fields, **extra})
        return b"%b,%b" % (self.opened, orjson.dumps(extra)[1:])
