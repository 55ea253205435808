"""The wire contract between router and engine (docs/REFERENCE.md, "Wire contract").

A *remote* turn carries a bootstrap address and room in both bodies, as SGLang's own
routers do. A *local* turn carries no room but a marker in ``custom_params``, the one
dict that SGLang 0.5.21 hands unchanged from all its endpoints to the scheduler
(unknown top-level fields are dropped there). The marker has the name that SGLang's
draft PR #34773 gives the field. ``min_cached_tokens`` is a precondition in the sense
of HTTP's If-Match: a decode worker that holds less refuses before any work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ppd.errors import ContractError


class Role(StrEnum):
    """What a worker does; SGLang's words, as in ``--disaggregation-mode``, and ``replica`` for a
    server that does both."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"


LOCAL_MARKER = "do_local_prefill"
MIN_CACHED_TOKENS = "min_cached_tokens"

# What a client could use to aim KV transfers, or to pass for the router.
FORBIDDEN_FIELDS = frozenset(
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
        "routing_key",
        # Engine-side sessions live on one worker, and their names are not a tenant's own.
        "session_id",
        "session_params",
    }
)
FORBIDDEN_CUSTOM_PARAMS = frozenset({LOCAL_MARKER, MIN_CACHED_TOKENS})

_REFUSAL_PREFIX = "ppd-refusal "


@dataclass(frozen=True, slots=True)
class LocalTerms:
    """Under which condition a decode worker shall append-prefill itself."""

    min_cached_tokens: int = 0

    def to_custom_params(self) -> dict[str, object]:
        return {LOCAL_MARKER: True, MIN_CACHED_TOKENS: self.min_cached_tokens}


def is_marked(custom_params: object) -> bool:
    """Whether a request asks for a local prefill, well-formed or not."""
    return isinstance(custom_params, Mapping) and bool(custom_params.get(LOCAL_MARKER))


def parse_terms(custom_params: object) -> LocalTerms:
    """The terms of a marked request.

    Raises:
        ContractError: the marker is not ``true``, or the precondition is no token count.
    """
    if not isinstance(custom_params, Mapping):
        raise ContractError(f"custom_params must be an object, got {custom_params!r}")
    if custom_params.get(LOCAL_MARKER) is not True:
        raise ContractError(f"{LOCAL_MARKER} must be true, got {custom_params.get(LOCAL_MARKER)!r}")
    least = custom_params.get(MIN_CACHED_TOKENS, 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise ContractError(
            f"{MIN_CACHED_TOKENS} must be a number of tokens (an integer >= 0), got {least!r}"
        )
    return LocalTerms(min_cached_tokens=least)


class RefusalReason(StrEnum):
    TOO_FEW_CACHED_TOKENS = "too_few_cached_tokens"
    TOO_MANY_TOKENS = "too_many_tokens"  # with those that wait there already
    MALFORMED_TERMS = "malformed_terms"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a decode worker did not take a local turn; travels as the abort's message.

    ``flushes``: how often its whole cache has been flushed; None if it does not tell.
    """

    reason: RefusalReason
    cached_tokens: int = 0
    min_cached_tokens: int = 0
    detail: str = ""
    flushes: int | None = None

    def to_message(self) -> str:
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
    """The refusal that an engine's error message is, or None if it is some other error.

    Only at the start of a message: validation errors repeat what a client has sent.
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
            flushes=None if (told := fields.get("flushes")) is None else int(told),
        )
    except (ValueError, KeyError, TypeError):
        return None
