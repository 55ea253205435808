"""The wire contract between router and engine (docs/REFERENCE.md, "Wire contract").

A *remote* turn carries a bootstrap address and room in both bodies, as SGLang's own routers do.
A *local* turn carries no room. It carries a marker in ``custom_params``, the one dict that
SGLang 0.5.21 passes unchanged from all its endpoints to the scheduler. SGLang drops unknown
top-level fields. The marker has the name that SGLang's draft PR #34773 gives the field.
``min_cached_tokens`` is a precondition in the sense of HTTP's If-Match: a decode worker that
holds fewer tokens refuses the request before any work.

A worker describes itself under ``internal_states[0]["ppd"]`` of ``/server_info``, as a
``WorkerDescription``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from ppd.errors import ContractError

Count = Annotated[int, msgspec.Meta(ge=0)]


class Role(StrEnum):
    """The role of a worker.

    ``prefill`` and ``decode`` are SGLang's own words (``--disaggregation-mode``). A ``replica`` is
    a server that does both.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"


LOCAL_MARKER = "do_local_prefill"
MIN_CACHED_TOKENS = "min_cached_tokens"

# Fields by which a client could redirect KV transfers, or pass for the router.
STRIPPED_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        LOCAL_MARKER,
        MIN_CACHED_TOKENS,
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "pd_rebootstrap_prefill_url",
        # Upstream reserves these for orchestrators ("never by an application client").
        "kv_hints",
        "encoder_urls",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        # Names of images in a cache of all tenants.
        "mm_hashes",
        "mm_content_hashes",
        "routing_key",
        # Engine-side sessions live on one worker, and all tenants share their names.
        "session_id",
        "session_params",
    }
)
STRIPPED_CUSTOM_PARAMS = frozenset({LOCAL_MARKER, MIN_CACHED_TOKENS})

_REFUSAL_PREFIX = "ppd-refusal "


@dataclass(frozen=True, slots=True)
class LocalTerms:
    """The condition under which a decode worker append-prefills a turn itself.

    Attributes:
        min_cached_tokens: the decode worker must hold at least so many tokens of the prompt.
    """

    min_cached_tokens: int = 0

    def to_custom_params(self) -> dict[str, object]:
        """The ``custom_params`` of a local turn: the marker and the precondition."""
        return {LOCAL_MARKER: True, MIN_CACHED_TOKENS: self.min_cached_tokens}


def is_marked(custom_params: object) -> bool:
    """Whether a request asks for a local prefill, well-formed or not."""
    return isinstance(custom_params, Mapping) and bool(custom_params.get(LOCAL_MARKER))


def parse_terms(custom_params: object) -> LocalTerms:
    """Parse the terms of a marked request.

    Raises:
        ContractError: the marker is not ``true``, or the precondition is no token count.
    """
    if not isinstance(custom_params, Mapping):
        raise ContractError(f"custom_params must be an object, got {custom_params!r}")
    if custom_params.get(LOCAL_MARKER) is not True:
        raise ContractError(f"{LOCAL_MARKER} must be true, got {custom_params.get(LOCAL_MARKER)!r}")
    min_cached = custom_params.get(MIN_CACHED_TOKENS, 0)
    if not isinstance(min_cached, int) or isinstance(min_cached, bool) or min_cached < 0:
        raise ContractError(
            f"{MIN_CACHED_TOKENS} must be a number of tokens (an integer >= 0), got {min_cached!r}"
        )
    return LocalTerms(min_cached_tokens=min_cached)


def terms_of(custom_params: object) -> LocalTerms:
    """Return the terms of a request for a local prefill; one without a marker has none.

    Raises:
        ContractError: the terms of a marked request are malformed.
    """
    return parse_terms(custom_params) if is_marked(custom_params) else LocalTerms()


class RefusalReason(StrEnum):
    """Why a decode worker refuses a local turn.

    Attributes:
        TOO_FEW_CACHED_TOKENS: the worker holds fewer tokens than the request requires.
        TOO_MANY_TOKENS: the worker would have too many append tokens under way, with those of
            the requests that wait there already.
        MALFORMED_TERMS: the marker or the precondition is malformed.
        MEDIA: the request has images, audio or video, which local prefill was never tried with.
    """

    TOO_FEW_CACHED_TOKENS = "too_few_cached_tokens"
    TOO_MANY_TOKENS = "too_many_tokens"
    MALFORMED_TERMS = "malformed_terms"
    MEDIA = "media"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decode worker's refusal of a local turn, sent as the abort's message.

    Attributes:
        cached_tokens: tokens of the prompt that the worker holds.
        min_cached_tokens: tokens that the request requires.
        detail: free text for logs.
        flushes: how often the worker has flushed its whole cache; None if it is not reported.
    """

    reason: RefusalReason
    cached_tokens: int = 0
    min_cached_tokens: int = 0
    detail: str = ""
    flushes: int | None = None

    def to_message(self) -> str:
        """Encode the refusal as the text of an engine's error message."""
        return _REFUSAL_PREFIX + json.dumps(
            {
                "reason": self.reason.value,
                "cached_tokens": self.cached_tokens,
                "min_cached_tokens": self.min_cached_tokens,
                "detail": self.detail,
                "flushes": self.flushes,
            }
        )


def parse_refusal(message: str) -> Refusal | None:
    """Parse an engine's error message; None if it is another error than a refusal.

    The prefix counts only at the start of a message: validation errors repeat a client's input.
    """
    if not message.startswith(_REFUSAL_PREFIX):
        return None
    try:
        fields, _ = json.JSONDecoder().raw_decode(message, len(_REFUSAL_PREFIX))
        return Refusal(
            reason=RefusalReason(fields["reason"]),
            cached_tokens=int(fields["cached_tokens"]),
            min_cached_tokens=int(fields["min_cached_tokens"]),
            detail=str(fields.get("detail", "")),
            flushes=None if (flushes := fields.get("flushes")) is None else int(flushes),
        )
    except (ValueError, KeyError, TypeError):
        return None


class WorkerLoad(msgspec.Struct, frozen=True):
    """The load of a worker at one moment.

    Attributes:
        running: requests that decode.
        waiting: local requests that wait.
        append_tokens: uncached tokens of the local requests that wait or are in mid-prefill.
        kv_used_tokens: KV in use; what could be evicted counts as free.
        kv_total_tokens: capacity of the KV cache.
        decode_step_ms: moving average of a decode step without prefill; None before the first.
    """

    running: Count = 0
    waiting: Count = 0
    append_tokens: Count = 0
    kv_used_tokens: Count = 0
    kv_total_tokens: Count = 0
    decode_step_ms: float | None = None


DESCRIPTION_VERSION = 1


class WorkerDescription(WorkerLoad, frozen=True, kw_only=True):
    """A worker's description of itself under ``internal_states[0]["ppd"]`` of ``/server_info``.

    The wire format is flat: the fields of ``WorkerLoad`` stand beside these. A reader ignores
    fields that it has no use for, so a worker may be newer than its router.

    Attributes:
        version: the format of the description, ``DESCRIPTION_VERSION``.
        boot_id: random name of the server's process; it changes with every restart.
        local_prefill: whether the worker takes local append-prefills.
        dp_rank: the rank of data parallelism whose description this is.
        plugin_version: version of the ``sglang-ppd`` package.
        native: whether SGLang itself takes local prefills, without the scheduling hooks.
        vocab_size: number of token ids of the model.
        flushes: how often the process has flushed its whole KV cache; None if not counted.
        kv_token_bytes: bytes of one token's KV in a transfer, over all ranks; None if unknown.
        special_tokens: the model's special tokens of unusual form (``ppd.marks``).
        cache_slack_tokens: tokens at the end of a conversation that its next turn may not find in
            the cache, because of speculation.
        gpu: the driver's name of its GPU; "": unknown, or none.
        link_gbps: gigabits a second of its link to other workers; None if unknown.
        prefilling: requests in mid-prefill. This counter and those after it stand only in the
            description of a worker with the scheduling hooks. They count since the process began.
        accepted: local requests that were queued.
        prefilled: local prefills that were completed.
        unroomed: accepted requests that had neither a bootstrap room nor a marker.
        too_few_cached_tokens: requests refused on arrival for the precondition.
        evicted_while_waiting: requests refused for the precondition when their turn came.
        too_many_tokens: requests refused because of the bound on append tokens.
        malformed_terms: requests refused for malformed terms.
        media: requests refused because they have images, audio or video.
        aborted: requests aborted while they waited or between two chunks.
        requeued: requests that lost their KV and were prefilled again.
        chunks: chunks of local prefill.
        cached_tokens: prompt tokens of accepted requests that were cached on arrival.
        uncached_tokens: prompt tokens of accepted requests that were not.
        longest_decode_gap_ms: longest time between two tokens of running decodes across a chunk.
    """

    version: int
    boot_id: str
    local_prefill: bool
    dp_rank: Count = 0
    plugin_version: str = ""
    native: bool = False
    vocab_size: Count | None = None
    flushes: Count | None = None
    kv_token_bytes: Count | None = None
    special_tokens: tuple[str, ...] = ()
    cache_slack_tokens: Count = 0
    gpu: str = ""
    link_gbps: float | None = None
    prefilling: Count | UnsetType = UNSET
    accepted: Count | UnsetType = UNSET
    prefilled: Count | UnsetType = UNSET
    unroomed: Count | UnsetType = UNSET
    too_few_cached_tokens: Count | UnsetType = UNSET
    evicted_while_waiting: Count | UnsetType = UNSET
    too_many_tokens: Count | UnsetType = UNSET
    malformed_terms: Count | UnsetType = UNSET
    media: Count | UnsetType = UNSET
    aborted: Count | UnsetType = UNSET
    requeued: Count | UnsetType = UNSET
    chunks: Count | UnsetType = UNSET
    cached_tokens: Count | UnsetType = UNSET
    uncached_tokens: Count | UnsetType = UNSET
    longest_decode_gap_ms: float | UnsetType = UNSET

    def load(self) -> WorkerLoad:
        """The part of the description that changes from moment to moment."""
        names = WorkerLoad.__struct_fields__
        return WorkerLoad(**{name: getattr(self, name) for name in names})

    def to_json_object(self) -> dict[str, object]:
        """The description as a dict of plain values, without the fields that are unset."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        return fields


def parse_description(data: object) -> WorkerDescription | None:
    """Parse the decoded JSON value of ``internal_states[0]["ppd"]``.

    Returns:
        None if there is no description, if it is malformed, or if its version is another one than
        ``DESCRIPTION_VERSION``. Such a worker can be served as one without the plugin.
    """
    try:
        description = msgspec.convert(data, type=WorkerDescription)
    except msgspec.ValidationError:
        return None
    return description if description.version == DESCRIPTION_VERSION else None
