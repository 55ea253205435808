"""SGLang's paths, answers, error messages and limits, for all versions served.

With ``sglang_events.py`` (the wire format of KV events) this is the file to visit for a new SGLang
release. It was written against 0.5.21 (``python/sglang/srt``); a fact about another version names
that version. It parses what workers send and makes no request. The messages from the router to
workers are in ``ppd/contract.py`` and ``router/serving/bodies.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ppd.contract import DESCRIPTION_VERSION, Role, parse_description
from ppd.errors import EngineError, WorkerError
from ppd.machine import Machine

logger = logging.getLogger("ppd.router.workers")

# -- paths, defaults and limits -----------------------------------------------------------

INFO_PATH = "/server_info"
MODELS_PATH = "/v1/models"
READY_PATH = "/ready"  # 503 while the server starts and while it shuts down
LOADS_PATH = "/v1/loads"
LOADS_QUERY = {"include": "core"}

COMPLETION_MAX_TOKENS = 16  # of /v1/completions without max_tokens (entrypoints/openai/protocol.py)
GENERATE_MAX_TOKENS = 128  # of /generate without max_new_tokens (sampling/sampling_params.py)

# SGLang looks these up in the vocabulary without a check, and dies of one that lies outside.
TOKEN_ID_FIELDS = ("prompt", "input_ids", "stop_token_ids", "token_ids_logprob")
RANK_FIELDS = ("top_logprobs", "top_logprobs_num", "logprobs")  # at most the vocabulary's size

NO_PARALLEL_SAMPLES = (
    "SGLang 0.5.21 does not finish parallel samples between prefill and decode workers"
)

# The values of --disaggregation-mode in /server_info.
_MODES = {role: role.value for role in Role} | {Role.REPLICA: "null"}

_WILDCARD_HOSTS = ("*", "0.0.0.0", "::", "[::]")  # a publisher of KV events binds to them

# -- errors -------------------------------------------------------------------------------

# Parts of the messages when KV was not transferred (disaggregation/decode.py:2649,
# prefill.py:1120, 1185, common/conn.py:91). They do not name the worker at fault.
_TRANSFER_ERRORS = (
    *("transfer failed", "bootstrap failed", "KVTransferError"),
    "KV checksum mismatch",  # --disaggregation-enable-kv-checksum
)

# 0.5.21's refusal of a request without a bootstrap room, by a worker without the plugin. It is
# compared with the start of a message, because validation errors repeat a client's input.
_NO_ROOM_ERROR = "Invalid request: Disaggregated request received without bootstrap room"


def is_transfer_failure(message: str) -> bool:
    """Whether an error message means that KV was not transferred."""
    return any(text in message for text in _TRANSFER_ERRORS)


def is_unpatched(message: str) -> bool:
    """Whether an error message means that a decode worker has no plugin for local turns."""
    return message.startswith(_NO_ROOM_ERROR)


def error_of(answer: object, status: int) -> EngineError | None:
    """The error in a body or event of an engine; None if it holds none.

    The error has OpenAI's nested form, SGLang's flat form, or the form of an abort in an answer of
    ``/generate``.

    Args:
        answer: the decoded JSON.
        status: the HTTP status of the response; the error's own code takes precedence.
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
    codes = [value for value in (code, status) if isinstance(value, int) and 400 <= value <= 599]
    return EngineError(
        message,
        status=codes[0] if codes else 500,
        kind=kind if isinstance(kind, str) and not kind.isdigit() else "engine_error",
    )


# -- answers ------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer, as the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


def usage_of_openai(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of an OpenAI-style body or event; None if it has none.

    SGLang sends null for ``prompt_tokens_details`` where no token was cached, and its
    ``reasoning_tokens`` beside the other counts rather than in ``completion_tokens_details``.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        reasoning_tokens=usage.get("reasoning_tokens") or 0,
    )


def usage_of_generate(answer: object) -> Usage | None:
    """The usage of a ``/generate`` body or event, or the sum over a batch's body."""
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


def total_usage(usages: Iterable[Usage]) -> Usage | None:
    """The sum over several prompts; None for no prompts."""
    counts = [msgspec.structs.astuple(usage) for usage in usages]
    return Usage(*map(sum, zip(*counts, strict=True))) if counts else None


def stop_string_of(choice: Mapping[str, Any]) -> str | None:
    """The stop string that ended a choice; None if it ended otherwise.

    ``matched_stop`` is a string for a stop string, and a number for a stop token.
    """
    matched = choice.get("matched_stop")
    return matched if isinstance(matched, str) and choice.get("finish_reason") == "stop" else None


# -- handshake ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sockets where a worker publishes KV events.

    Attributes:
        port: port of the first data-parallel rank; each further rank has the next port.
        topic: prefix of the messages to subscribe to.
        ranks: number of data-parallel ranks.
    """

    port: int
    topic: str
    ranks: int


_UNKNOWN = Machine("")


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's properties, from ``/server_info`` and ``/v1/models``.

    The fields from ``local_prefill`` on describe a plain PD worker by default. The plugin's
    ``ppd.contract.WorkerDescription`` gives ``local_prefill`` to ``cache_slack_tokens``.

    Attributes:
        role: the value of ``--disaggregation-mode``.
        models: names of the models that it serves.
        max_model_tokens: the longest context; None if not reported.
        page_size: tokens of a KV page.
        bootstrap_port: port of a prefill worker's bootstrap server.
        local_prefill: whether the worker takes local turns.
        boot_id: random name of the scheduler process; None without a usable description.
        vocab_size: number of token ids of the model; None if not reported.
        flushes: how often the process has flushed its whole KV cache.
        kv_token_bytes: bytes of one token's KV in a transfer; None if not reported.
        special_tokens: the model's special tokens of unusual form.
        cache_slack_tokens: tokens at the end of a conversation that its next turn may not find.
        publisher: where the worker publishes KV events; None if it publishes none.
        keeps_sessions: whether its radix cache has sessions. The router must not name those.
        dp_size: ranks of data parallelism, each with a radix cache of its own; at least 1.
        machine: what the worker runs on, as far as it is reported.
        description_problem: why the plugin's description is not used; None if it is, and without
            the plugin.
    """

    role: str
    models: tuple[str, ...]
    max_model_tokens: int | None
    page_size: int
    bootstrap_port: int
    local_prefill: bool = False
    boot_id: str | None = None
    vocab_size: int | None = None
    flushes: int = 0
    kv_token_bytes: int | None = None
    special_tokens: tuple[str, ...] = ()
    cache_slack_tokens: int = 0
    publisher: Publisher | None = None
    keeps_sessions: bool = False
    dp_size: int = 1
    machine: Machine = _UNKNOWN
    description_problem: str | None = None


def handshake_of(url: str, info: Any, models: Any) -> Handshake:
    """Parse the properties of a worker.

    A worker without the plugin, or with a description of another version, is a plain PD worker.

    Args:
        url: base URL of the worker, for messages.
        info: JSON of ``/server_info``.
        models: JSON of ``/v1/models``.

    Raises:
        WorkerError: the answers are not those of an SGLang server.
    """
    try:
        cards = models["data"]
        plain = Handshake(
            role=info["disaggregation_mode"],
            models=tuple(card["id"] for card in cards),
            max_model_tokens=cards[0].get("max_model_len"),
            page_size=int(info["page_size"]),
            bootstrap_port=int(info["disaggregation_bootstrap_port"]),
            publisher=_publisher(info, url),
            keeps_sessions=bool(info.get("enable_session_radix_cache")),
            dp_size=_ranks(info),
            machine=Machine("", int(info.get("tp_size") or 1), ranks=_ranks(info)),
        )
        return _with_description(plain, _description_of(info["internal_states"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error


def _ranks(info: dict[str, Any]) -> int:
    """The number of schedulers, each with a radix cache of its own.

    0.5.23 has the ranks of DP attention in a field of their own, and then a ``dp_size`` of 1
    (arg_groups/model_override_base.py:247); 0.5.21 has both kinds in ``dp_size``.
    """
    return max(1, int(info.get("dp_size") or 1)) * max(1, int(info.get("attn_dp_size") or 1))


def _description_of(states: list[dict[str, Any]]) -> object:
    """The plugin's description of a worker; of several ranks always the same rank's.

    SGLang lists the ranks in the order in which they answer.
    """
    if not states:
        raise LookupError("internal_states is empty")
    described = (state["ppd"] for state in states if "ppd" in state)
    return min(described, key=_order, default=None)


def _order(description: object) -> tuple[str, str]:
    """Sort by rank; older plugins report none, but a name of each rank."""
    found = description if isinstance(description, dict) else {}
    return str(found.get("dp_rank", 0)).zfill(9), str(found.get("boot_id"))


def _with_description(plain: Handshake, data: object) -> Handshake:
    """A plain worker's handshake with the fields of the plugin's description, if it is usable."""
    if data is None:
        return plain
    description = parse_description(data)
    if description is None:
        return replace(plain, description_problem=_description_problem(data))
    return replace(
        plain,
        local_prefill=description.local_prefill,
        boot_id=description.boot_id,
        vocab_size=description.vocab_size,
        flushes=description.flushes or 0,
        kv_token_bytes=description.kv_token_bytes,
        special_tokens=description.special_tokens,
        cache_slack_tokens=description.cache_slack_tokens,
        machine=msgspec.structs.replace(
            plain.machine, gpu=description.gpu, link_gbps=description.link_gbps
        ),
    )


def _description_problem(data: object) -> str:
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version == DESCRIPTION_VERSION:
        return f"its description of version {version} is malformed"
    return f"its description has version {version!r}, expected {DESCRIPTION_VERSION}"


def check_role(url: str, role: Role, handshake: Handshake) -> None:
    """Check that a worker runs in the role that the router was given for it.

    Raises:
        WorkerError: the worker runs in another role.
    """
    if handshake.role != _MODES[role]:
        raise WorkerError(
            f"{url} was given as a {role} worker, but runs with --disaggregation-mode "
            f"{handshake.role}"
        )


def _publisher(info: dict[str, Any], url: str) -> Publisher | None:
    """Where the worker publishes KV events; a malformed entry is logged, as they are optional."""
    events = info.get("kv_events")
    if not events:
        return None
    try:
        if events["publisher"] != "zmq":
            return None
        # SGLang connects to any other host, and binds no socket.
        if events["endpoint_host"] not in _WILDCARD_HOSTS:
            raise ValueError(f"it must bind to *, not to {events['endpoint_host']}")
        port, ranks = int(events["endpoint_port_base"]), int(events["dp_size"])
        return Publisher(port, str(events["topic"]), ranks)
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("cannot subscribe to the KV events of %s: %r", url, error)
        return None


# -- load ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A decode worker's report of its load.

    Attributes:
        running: requests in its batch.
        free_tokens: KV that is free.
        written_at_s: when the report was written, by the worker's own clock.
    """

    running: int
    free_tokens: int
    written_at_s: float


def loads_of(answer: Any, previous: Sequence[Load | None]) -> list[Load]:
    """Parse a report of load, by rank.

    SGLang 0.5.21 writes its load at every step, and an idle worker makes no steps. A report that
    was not written again since the previous one describes a batch that has ended.

    Args:
        answer: JSON of ``/v1/loads?include=core``.
        previous: the previous report of each rank; None for the first one.

    Raises:
        ValueError, LookupError, TypeError: the answer is no report of the load of all ranks.
    """
    by_rank = {int(load.get("dp_rank", 0)): load for load in answer["loads"]}
    return [_load_of(by_rank[rank], before) for rank, before in enumerate(previous)]


def _load_of(load: Any, previous: Load | None) -> Load:
    free_tokens = int(load["max_total_num_tokens"]) - int(load["num_total_tokens"])
    written_at_s = float(load["timestamp"])
    idle = previous is not None and previous.written_at_s == written_at_s
    return Load(0 if idle else int(load["num_running_reqs"]), free_tokens, written_at_s)
