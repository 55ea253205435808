"""What the answer cache may do, and what a request may ask of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``answer_cache`` object of a request; its fields stand over the configuration's."""

    threshold: float | None = None
    ttl_s: float | None = None

    def problems(self) -> Iterator[str]:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            yield f"threshold must be above 0 and at most 1, got {self.threshold:g}"
        if self.ttl_s is not None and not self.ttl_s > 0:
            yield f"ttl_s must be above 0, got {self.ttl_s:g}"


class AnswerCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[answer_cache]`` of the router's file.

    Attributes:
        url: of the pool, which must embed text.
        collection: made on first use.
        threshold: least cosine of two questions that shall have one answer.
        ttl_s: of an answer, and the longest that a request may ask for.
        always: also requests that say nothing.
        timeout_ms: of a look-up; then the question is answered by the model.
        max_characters: longer questions and answers are not kept.
        sweep_s: in which answers past their time are deleted.
    """

    url: str
    collection: str = "answers"
    threshold: float = 0.95
    ttl_s: float = 3600.0
    always: bool = False
    timeout_ms: float = 100.0
    max_characters: int = 32_768
    sweep_s: float = 60.0

    def problems(self) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"answer_cache.url must begin with http:// or https://, got {self.url!r}"
        if not self.collection:
            yield "answer_cache.collection is empty"
        if not 0 < self.threshold <= 1:
            yield f"answer_cache.threshold must be above 0 and at most 1, got {self.threshold:g}"
        for name in ("ttl_s", "timeout_ms", "max_characters", "sweep_s"):
            if not getattr(self, name) > 0:
                yield f"answer_cache.{name} must be above 0, got {getattr(self, name)}"
