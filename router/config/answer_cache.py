"""Options of the answer cache: those of the router and those of one request."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .ranges import Positive, PositiveInt, Share, range_problems


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``answer_cache`` object of a request.

    A field that is not None replaces the configuration's. Its types have no ranges: a decoding
    error would replace the messages below, which clients see.

    Attributes:
        threshold: minimum cosine of two questions that share an answer, above 0 and at most 1.
        ttl_s: lifetime of the stored answer, above 0.
    """

    threshold: float | None = None
    ttl_s: float | None = None

    def problems(self) -> Iterator[str]:
        """Yield a message for each field that is out of range."""
        if self.threshold is not None and not 0 < self.threshold <= 1:
            yield f"threshold must be above 0 and at most 1, got {self.threshold:g}"
        if self.ttl_s is not None and not self.ttl_s > 0:
            yield f"ttl_s must be above 0, got {self.ttl_s:g}"


class AnswerCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[answer_cache]`` of the router's file.

    Attributes:
        url: the pool's base URL. The pool must embed text.
        collection: the pool's collection of answers. It is created on first use.
        threshold: minimum cosine of two questions that share an answer.
        ttl_s: default lifetime of an answer, and the maximum that a request may set.
        always: the cache also serves requests without an ``answer_cache`` object.
        timeout_ms: limit of a look-up. After it the model answers the question.
        max_characters: longer questions and answers are not stored.
        sweep_s: interval between two deletions of expired answers.
    """

    url: str
    collection: str = "answers"
    threshold: Share = 0.95
    ttl_s: Positive = 3600.0
    always: bool = False
    timeout_ms: Positive = 100.0
    max_characters: PositiveInt = 32_768
    sweep_s: Positive = 60.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that is wrong."""
        if not self.url.startswith(("http://", "https://")):
            yield f"answer_cache.url must begin with http:// or https://, got {self.url!r}"
        if not self.collection:
            yield "answer_cache.collection is empty"
        yield from range_problems(self, "answer_cache.")
