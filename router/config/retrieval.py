"""Options of retrieval: those of a request, a model or a tenant, and those of the router."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from .ranges import Positive, PositiveInt, range_problems

MAX_PASSAGES = 64


class Stage(StrEnum):
    """The stage of a turn that searches: before its prefill, or while its reply is decoded."""

    PREFILL = "prefill"
    DECODE = "decode"


class Failure(StrEnum):
    """The handling of a request whose retrieval failed or was too late.

    ``GO_WITHOUT`` serves it without passages; ``FAIL`` answers it with an error.
    """

    GO_WITHOUT = "go_without"
    FAIL = "fail"


class RetrievalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``retrieval`` object of a request; in the configuration, a default of it.

    Its types have no ranges: a decoding error would replace the messages of ``problems``, which
    clients see.

    Attributes:
        collection: the collection that is searched.
        k: maximum number of passages, 1 to ``MAX_PASSAGES``.
        threshold: minimum score of a passage, by the collection's metric; None: no minimum.
        filter: condition on the metadata of passages, in the form of the pool's search.
        on_failure: handling of a failed search.
        query: the text searched for. ``{question}`` stands for the text of the new turn.
        stages: the stages that search.
        every_tokens: tokens of a reply between two searches of the decode stage.
        max_additions: maximum number of passages that the decode stage adds to one reply.
        confidence: a token with a lower probability starts a search at once. It needs a request
            with ``logprobs``. None: no token does.
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
        """Yield a message for each field that is wrong."""
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
    """Retrieval options of one tenant.

    Attributes:
        collections: the collections that the tenant may search; None: all. Without a default of
            the tenant's own, a model's default is used only if its collection is one of them.
        default: options of requests without a ``retrieval`` object.
    """

    collections: tuple[str, ...] | None = None
    default: RetrievalOptions | None = None

    def allows(self, collection: str) -> bool:
        """Return whether the tenant may search a collection."""
        return self.collections is None or collection in self.collections

    def problems(self) -> Iterator[str]:
        """Yield a message for each field of the default that is wrong."""
        if self.default is not None:
            yield from self.default.problems()
            if not self.allows(self.default.collection):
                yield f"collection {self.default.collection!r} is not one of the tenant's"


class Milvus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Milvus server that replaces the pool.

    Attributes:
        uri: address of the Milvus server.
        embeddings_url: base URL of a server of ``/v1/embeddings``.
        embeddings_model: the model that the embedding requests name.
        text_field: name of the field with a row's passage.
        token: token of the Milvus user; "": $PPD_MILVUS_TOKEN, or none.
    """

    uri: str
    embeddings_url: str
    embeddings_model: str = "default"
    text_field: str = "text"
    token: str = ""


class Chroma(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Chroma server that replaces the pool.

    Attributes:
        url: base URL of the Chroma server.
        embeddings_url: base URL of a server of ``/v1/embeddings``.
        embeddings_model: the model that the embedding requests name.
        tenant: Chroma's tenant of the collections.
        database: Chroma's database of the collections.
        token: token of the Chroma server; "": $PPD_CHROMA_TOKEN, or none.
    """

    url: str
    embeddings_url: str
    embeddings_model: str = "default"
    tenant: str = "default_tenant"
    database: str = "default_database"
    token: str = ""


class RetrievalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[retrieval]`` of the router's file.

    Attributes:
        url: base URL of the pool; "" if another server replaces it.
        milvus: a server that replaces the pool.
        chroma: a server that replaces the pool.
        ttft_budget_ms: TTFT of a turn with retrieval that has no TTFT target of its own. The
            predicted time of its prefill is reserved within it.
        min_ms: shortest time limit of a search, whatever the budget leaves.
        max_ms: longest time limit of a search.
        decode_max_ms: time limit of a search of the decode stage.
        room_timeout_s: limit on the wait for the stream's worker to prefill passages of the
            decode stage. A worker without a free slot may never do it.
        defaults: options of requests without a ``retrieval`` object, by model.
        tenants: retrieval options of tenants, by name.
        feedback_interval_s: interval of reports to the pool. They contain the use of the KV links
            and the time of a stream's token.
        link_bytes_per_s: capacity of the KV links of all prefill workers together; None: the
            highest rate that they have had.
        memory_bytes: maximum size of the stored passages of conversations. The next turn of a
            conversation whose passages were evicted is routed remote.
        memory_s: lifetime of stored passages after their last use.
    """

    url: str = ""
    milvus: Milvus | None = None
    chroma: Chroma | None = None
    ttft_budget_ms: Positive = 1000.0
    min_ms: Positive = 20.0
    max_ms: Positive = 1000.0
    decode_max_ms: Positive = 2000.0
    room_timeout_s: Positive = 10.0
    defaults: dict[str, RetrievalOptions] = {}
    tenants: dict[str, TenantRetrieval] = {}
    feedback_interval_s: Positive = 1.0
    link_bytes_per_s: Positive | None = None
    memory_bytes: PositiveInt = 64 * 1024 * 1024
    memory_s: Positive = 3600.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that is wrong."""
        stores = (self.url != "", self.milvus is not None, self.chroma is not None)
        if sum(stores) != 1:
            yield "retrieval: give one of url, milvus and chroma"
        urls = {"url": self.url}
        if self.chroma is not None:
            urls |= {
                "chroma.url": self.chroma.url,
                "chroma.embeddings_url": self.chroma.embeddings_url,
            }
        if self.milvus is not None:
            urls["milvus.embeddings_url"] = self.milvus.embeddings_url
        for name, url in urls.items():
            if url and not url.startswith(("http://", "https://")):
                yield f"retrieval.{name} must begin with http:// or https://, got {url!r}"
        if self.min_ms > self.max_ms:
            yield f"retrieval.min_ms must be at most max_ms, got {self.min_ms} and {self.max_ms}"
        yield from range_problems(self, "retrieval.")
        for model, default in self.defaults.items():
            yield from (f"retrieval.defaults.{model}: {wrong}" for wrong in default.problems())
        for tenant, options in self.tenants.items():
            where = f"retrieval.tenants.{tenant}.default"
            yield from (f"{where}: {wrong}" for wrong in options.problems())

    def default_collections(self) -> frozenset[str]:
        """Return the collections of all defaults."""
        own = (options.default for options in self.tenants.values())
        defaults = (*self.defaults.values(), *own)
        return frozenset(default.collection for default in defaults if default is not None)
