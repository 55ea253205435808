"""What the router reads of SGLang: its answers, errors, states and limits, for all versions served.

One file to visit for a new SGLang release. Written against 0.5.21 (``python/sglang/srt``); what is
said of other versions names them. What travels the other way, the wire contract of local and
remote turns, is ``ppd/contract.py``'s and ``router/serving/bodies.py``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ppd.contract import Role
from ppd.errors import EngineError, WorkerError

logger = logging.getLogger("ppd.router.workers")

# -- defaults and limits ------------------------------------------------------------------

COMPLETION_MAX_TOKENS = 16  # of /v1/completions without max_tokens (entrypoints/openai/protocol.py)
GENERATE_MAX_TOKENS = 128  # of /generate without max_new_tokens (sampling/sampling_params.py)

# The values of --disaggregation-mode, as /server_info has them.
_MODES = {role: role.value for role in Role} | {Role.REPLICA: "null"}

_ANY_HOST = ("*", "0.0.0.0", "::", "[::]")  # where a publisher of KV events binds

# -- errors -------------------------------------------------------------------------------

# In errors (disaggregation/decode.py:2649, prefill.py:1120, 1185, common/conn.py:91) when KV did
# not get from one worker to the other. They do not tell which of the two is at fault.
_TRANSFER_MARKS = ("transfer failed", "bootstrap failed", "KVTransferError")

# How 0.5.21 refuses what is neither remote nor, for want of the plugin, local. Only at the start
# of a message: validation errors repeat what a client has sent.
_UNPATCHED = "Invalid request: Disaggregated request received without bootstrap room"


def is_transfer_failure(message: str) -> bool:
    """Whether an error means that KV was not transferred."""
    return any(mark in message for mark in _TRANSFER_MARKS)


def is_unpatched(message: str) -> bool:
    """Whether an error means that a decode worker has no plugin for local turns."""
    return message.startswith(_UNPATCHED)


def error_of(answer: object, status: int) -> EngineError | None:
    """The error in a body or event of an engine; None if it holds none.

    OpenAI's nested form, SGLang's flat one, or the abort in a ``/generate`` answer.
    """
    match answer:
        case {"error": {"message": str(message), **rest}}:
            return _error(message, rest.get("code"), rest.get("type"), status)
        case {"object": "error", "message": str(message), **rest}:
            return _error(message, rest.get("code"), rest.get("type"), status)
        case {"detail": str(message)}:
            return _error(message, None, None, status)
        case {"meta_info": {"finish_reason": {"type": "abort", "message": message, **rest}}}:
            return _error(str(message), rest.get("status_code"), rest.get("err_type"), status)
        case _:
            return None


def _error(message: str, code: object, kind: object, status: int) -> EngineError:
    given = [one for one in (code, status) if isinstance(one, int) and 400 <= one <= 599]
    return EngineError(
        message,
        status=given[0] if given else 500,
        kind=kind if isinstance(kind, str) and not kind.isdigit() else "engine_error",
    )


# -- usage --------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def usage_of_openai(answer: Mapping[str, Any]) -> Usage | None:
    """Usage of an OpenAI-style body or event. ``prompt_tokens_details`` is null for 0 cached."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
    )


def usage_of_generate(answer: object) -> Usage | None:
    """Usage of a ``/generate`` body or event; of a batch's body, all of it."""
    if isinstance(answer, list):
        return total_usage(filter(None, map(usage_of_generate, answer)))
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return None
    return Usage(
        prompt_tokens=meta.get("prompt_tokens") or 0,
        completion_tokens=meta.get("completion_tokens") or 0,
        cached_tokens=meta.get("cached_tokens") or 0,
    )


def total_usage(several: Iterable[Usage]) -> Usage | None:
    """The sum over several prompts; None of none."""
    counted = [(u.prompt_tokens, u.completion_tokens, u.cached_tokens) for u in several]
    return Usage(*map(sum, zip(*counted, strict=True))) if counted else None


# -- state --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where a worker publishes KV events.

    Attributes:
        port: of the worker's host; each data-parallel rank has the next one.
        ranks: how many.
    """

    port: int
    topic: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's description of itself (``/server_info`` and ``/v1/models``).

    Attributes:
        role: the value of ``--disaggregation-mode``.
        local_prefill: it takes local turns.
        boot_id: of the plugin's process; None without the plugin.
        flushes: how often its whole KV cache was flushed.
        kv_token_bytes: of a token's KV in a transfer; None if not reported.
        special_tokens: of unusual form.
        publisher: of KV events; None if it publishes none.
        keeps_sessions: its radix cache has sessions, whose names are not the router's to give.
    """

    role: str
    models: tuple[str, ...]
    max_model_tokens: int | None
    page_size: int
    bootstrap_port: int
    local_prefill: bool
    boot_id: str | None
    vocab_size: int | None
    flushes: int = 0
    kv_token_bytes: int | None = None
    special_tokens: tuple[str, ...] = ()
    publisher: Publisher | None = None
    keeps_sessions: bool = False


def handshake_of(url: str, info: Any, models: Any) -> Handshake:
    """Read a worker's description.

    Args:
        info: JSON of ``/server_info``.
        models: JSON of ``/v1/models``.

    Raises:
        WorkerError: the answers are not an SGLang server's.
    """
    try:
        plugin: dict[str, Any] = info["internal_states"][0].get("ppd") or {}
        cards = models["data"]
        return Handshake(
            role=info["disaggregation_mode"],
            models=tuple(card["id"] for card in cards),
            max_model_tokens=cards[0].get("max_model_len"),
            page_size=int(info["page_size"]),
            bootstrap_port=int(info["disaggregation_bootstrap_port"]),
            local_prefill=bool(plugin.get("local_prefill")),
            boot_id=plugin.get("boot_id"),
            vocab_size=plugin.get("vocab_size"),
            flushes=plugin.get("flushes") or 0,
            kv_token_bytes=plugin.get("kv_token_bytes"),
            special_tokens=tuple(map(str, plugin.get("special_tokens") or ())),
            publisher=_publisher(info, url),
            keeps_sessions=bool(info.get("enable_session_radix_cache")),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error


def check_role(url: str, role: Role, handshake: Handshake) -> None:
    """Check that a worker runs in the role it was given as.

    Raises:
        WorkerError: it does not.
    """
    if handshake.role != _MODES[role]:
        raise WorkerError(
            f"{url} was given as a {role} worker, but runs with --disaggregation-mode "
            f"{handshake.role}"
        )


def _publisher(info: dict[str, Any], url: str) -> Publisher | None:
    """Where it publishes KV events; without them only a hint is lost."""
    events = info.get("kv_events")
    if not events:
        return None
    try:
        if events["publisher"] != "zmq":
            return None
        if events["endpoint_host"] not in _ANY_HOST:  # there SGLang connects, and binds nothing
            raise ValueError(f"it must bind to *, not to {events['endpoint_host']}")
        port, ranks = int(events["endpoint_port_base"]), int(events["dp_size"])
        return Publisher(port, str(events["topic"]), ranks)
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("the KV events that %s tells of cannot be heard: %r", url, error)
        return None


@dataclass(frozen=True, slots=True)
class Load:
    """A decode worker's report of its load (``/v1/loads``).

    Attributes:
        running: requests in its batch.
        free_tokens: KV left.
        written_at: by its own clock, in seconds.
    """

    running: int
    free_tokens: int
    written_at: float


def load_of(answer: Any, before: Load | None) -> Load:
    """Read a report of load.

    SGLang 0.5.21 writes its load when it takes a step, and takes none while it is idle: a report
    that was not written again since ``before`` is of a batch that has ended.

    Args:
        answer: JSON of ``/v1/loads?include=core``.

    Raises:
        ValueError, LookupError, TypeError: it is no such report.
    """
    load = answer["loads"][0]
    free_tokens = int(load["max_total_num_tokens"]) - int(load["num_total_tokens"])
    written_at = float(load["timestamp"])
    idle = before is not None and before.written_at == written_at
    return Load(0 if idle else int(load["num_running_reqs"]), free_tokens, written_at)
