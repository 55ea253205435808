"""What a request, a model or a tenant may ask of retrieval, and the router's part of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

MAX_PASSAGES = 64


class Stage(StrEnum):
    """When a search is made: before a turn is prefilled, or while its reply is decoded."""

    PREFILL = "prefill"
    DECODE = "decode"


class Failure(StrEnum):
    """What becomes of a request whose retrieval failed or came too late."""

    GO_WITHOUT = "go_without"
    FAIL = "fail"


class RetrievalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``retrieval`` object of a request; in the configuration, a default.

    Attributes:
        collection: to search in.
        k: passages at most.
        threshold: least score of a passage, by the collection's metric; None: any.
        filter: as the pool's search takes it.
        on_failure: of the search.
        query: what is searched for, ``{question}`` standing for the text of the new turn.
        stages: when: before the turn is prefilled, and while its reply is streamed.
        every_tokens: of a reply between two searches of the decode stage.
        max_additions: passages of the decode stage in one reply.
        confidence: a token less probable than that is searched for at once, where the request has
            ``logprobs``; None: none is.
    """

    collection: str
    k: int = 4
    threshold: float | None = None
    filter: Any = None
    on_failure: Failure = Failure.GO_WITHOUT
    query: str = "{question}"
    stages: frozenset[Stage] = frozenset({Stage.PREFILL})
    every_tokens: int = 64
    max_additions: int = 1
    confidence: float | None = None

    def problems(self) -> Iterator[str]:
        if not self.collection:
            yield "collection is empty"
        if not 1 <= self.k <= MAX_PASSAGES:
            yield f"k must be 1 to {MAX_PASSAGES}, got {self.k}"
        if "{question}" not in self.query:
            yield "query must contain {question}"
        if not self.stages:
            yield "stages must name prefill, decode or both"
        if self.every_tokens < 1 or self.max_additions < 1:
            yield "every_tokens and max_additions must be at least 1"
        if self.confidence is not None and not 0 < self.confidence <= 1:
            yield f"confidence must be above 0 and at most 1, got {self.confidence:g}"


class TenantRetrieval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Attributes:
        collections: that it may search; None: all.
        default: for requests that say nothing.
    """

    collections: tuple[str, ...] | None = None
    default: RetrievalOptions | None = None


class Milvus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Milvus server in the pool's place.

    Attributes:
        uri: of it.
        token: its user's; "": $PPD_MILVUS_TOKEN, or none.
        text_field: of a row, with the passage.
        embeddings_url: of a server of ``/v1/embeddings``; ``embeddings_model`` is its model.
    """

    uri: str
    embeddings_url: str
    embeddings_model: str = "default"
    text_field: str = "text"
    token: str = ""


class RetrievalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[retrieval]`` of the router's file.

    Attributes:
        url: of the pool; "" with ``milvus`` in its place.
        ttft_budget_ms: of a turn with retrieval, where its own target does not say; what its
            prefill is predicted to take is left to prefill.
        min_ms, max_ms: of a search, whatever the budget leaves.
        defaults: by model, for requests that say nothing.
        tenants: by name.
        feedback_interval_s: in which the pool is told how busy KV links are and how long streams
            stalled.
        link_bytes_per_s: what the KV links of all prefill workers carry together; None: taken as
            idle.
        decode_max_ms: of a search while a reply is streamed: nobody waits for it.
        room_timeout_s: to wait for the stream's worker to prefill what was found beside it; one
            without a free slot may never come to it.
        memory_bytes, memory_s: of passages put into conversations; older and excess ones are
            forgotten, and their conversations' next turns go remote.
    """

    url: str = ""
    milvus: Milvus | None = None
    ttft_budget_ms: float = 1000.0
    min_ms: float = 20.0
    max_ms: float = 1000.0
    decode_max_ms: float = 2000.0
    room_timeout_s: float = 10.0
    defaults: dict[str, RetrievalOptions] = {}
    tenants: dict[str, TenantRetrieval] = {}
    feedback_interval_s: float = 1.0
    link_bytes_per_s: float | None = None
    memory_bytes: int = 64 * 1024 * 1024
    memory_s: float = 3600.0

    def problems(self) -> Iterator[str]:
        if (self.milvus is None) is (self.url == ""):
            yield "retrieval: give one of url and milvus"
        urls = {"url": self.url}
        if self.milvus is not None:
            urls["milvus.embeddings_url"] = self.milvus.embeddings_url
        for name, url in urls.items():
            if url and not url.startswith(("http://", "https://")):
                yield f"retrieval.{name} must begin with http:// or https://, got {url!r}"
        if not 0 < self.min_ms <= self.max_ms:
            yield "retrieval: 0 < min_ms <= max_ms must hold"
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            yield f"retrieval.link_bytes_per_s must be above 0, got {self.link_bytes_per_s:g}"
        for name in (
            "ttft_budget_ms",
            "decode_max_ms",
            "room_timeout_s",
            "feedback_interval_s",
            "memory_bytes",
            "memory_s",
        ):
            if not getattr(self, name) > 0:
                yield f"retrieval.{name} must be above 0, got {getattr(self, name)}"
        for model, options in self.defaults.items():
            yield from (f"retrieval.defaults.{model}: {problem}" for problem in options.problems())
        for tenant, limits in self.tenants.items():
            if limits.default is not None:
                where = f"retrieval.tenants.{tenant}.default"
                yield from (f"{where}: {problem}" for problem in limits.default.problems())
