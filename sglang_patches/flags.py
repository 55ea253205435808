"""What a decode server with local prefill does with flags of SGLang that change scheduling or KV.

The list covers flags that are refused, that are warned about, and that were read or tried and
found right. docs/reference/flags.md is made of it. ``limits.py`` applies it. Line numbers are
SGLang 0.5.23's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What the plugin does with a flag, or with a kind of model."""

    TRIED = "tried"
    UNAFFECTED = "not affected"
    WARNED = "warned about"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of SGLang.

    Attributes:
        name: on the command line, without dashes in front.
        reason: why, in one sentence.
        default: the value that changes nothing. None, False and 0 mean the same.
        only_in: the SGLang version to which the verdict applies; None: all.
    """

    name: str
    verdict: Verdict
    reason: str
    default: Any = None
    only_in: str | None = None

    @property
    def attribute(self) -> str:
        """The field of ``ServerArgs``."""
        return self.name.replace("-", "_")

    def given_in(self, resolved: Any) -> bool:
        """Whether resolved arguments have another value than the default."""
        value = getattr(resolved, self.attribute, self.default)
        return (value or None) != (self.default or None)


def _refused(reason: str, *names: str, **settings: Any) -> tuple[Flag, ...]:
    return tuple(Flag(name, Verdict.REFUSED, reason, **settings) for name in names)


def _warned(reason: str, *names: str, **settings: Any) -> tuple[Flag, ...]:
    return tuple(Flag(name, Verdict.WARNED, reason, **settings) for name in names)


def _unaffected(reason: str, *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(name, Verdict.UNAFFECTED, reason) for name in names)


def _tried(reason: str, *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(name, Verdict.TRIED, reason) for name in names)


_OTHER_LOOP = "the scheduler runs another loop, which the plugin does not hook"
_DRAINED = (
    "the decode loop does not drain its events, so KV stays pinned (disaggregation/decode.py:3459)"
)
_RESTORED = (
    "a restored request takes KV that the plugin counts as free (disaggregation/decode.py:3445)"
)
_HOST_RECEIVE = "disaggregation-decode-host-receive-threshold"
_UPSTREAM = "SGLang itself refuses it on such a server"

FLAGS: tuple[Flag, ...] = (
    # Parallelism
    *_tried("each rank is a home of its own", "dp-size", "enable-dp-attention", "attn-dp-size"),
    *_refused(_OTHER_LOOP, "pp-size", default=1),
    *_refused("pages are as many times larger as there are ranks", "dcp-size", default=1),
    *_refused("extends take another path; never tried", "attn-cp-size", "moe-dp-size", default=1),
    *_refused("extends take another path; never tried", "enable-prefill-cp"),
    *_refused(
        "its buffers are sized for decode steps (moe_hook.py:566)",
        "moe-a2a-backend",
        default="none",
    ),
    *_refused("it has no split for mixed batches", "enable-two-batch-overlap"),
    *_warned("never tried", "enable-single-batch-overlap", "enable-eplb"),
    *_refused(
        "a change of ranks moves the namespace of the cache (scheduler.py:2898)",
        "elastic-ep-backend",
    ),
    *_unaffected(
        "for prefill servers or monolithic ones alone", "dwdp-size", "enable-kv-cache-sharding"
    ),
    *_unaffected("with pipeline parallelism alone", "enable-dynamic-chunking"),
    *_tried("one and two ranks, equal or not to the prefill server's", "tp-size"),
    # Scheduling
    *_refused(_OTHER_LOOP, "enable-pd-role-switch", "dllm-algorithm"),
    *_tried("forwards and scheduling in turn", "disable-overlap-schedule"),
    *_tried("chunks with decodes in one forward", "enable-mixed-chunk"),
    *_tried("the largest chunk", "chunked-prefill-size"),
    *_tried("preemption is off during a local prefill", "enable-priority-scheduling"),
    *_warned("the minimum batch size of the interval is ignored", "prefill-decode-interval-min-bs"),
    *_warned("local turns wait until so many slots are free", "min-free-slots-delay"),
    *_unaffected("the policy sorts the local queue", "schedule-policy"),
    *_unaffected("read by SGLang's own admission", "max-prefill-tokens", "prefill-max-requests"),
    *_unaffected("a decode server ignores it (scheduler.py:1451)", "enable-prefill-delayer"),
    *_unaffected("on monolithic servers alone (validation_hook.py:256)", "enable-pdmux"),
    # KV
    *_refused(_UPSTREAM, "enable-hisparse"),
    *_unaffected(_UPSTREAM + ": the radix cache is required", "disable-radix-cache"),
    *_unaffected(_UPSTREAM, "disaggregation-decode-allocation-policy", "enable-lmcache"),
    *_refused(
        _DRAINED, "enable-flexkv", "enable-unified-cache-external-linker", "radix-cache-backend"
    ),
    *_refused(
        "it takes prompts for stored by the prefill server, and local ones are not",
        "disaggregation-decode-enable-offload-kvcache",
    ),
    *_refused(_RESTORED, _HOST_RECEIVE, default=1.0, only_in="0.5.23"),
    *_refused(_RESTORED, _HOST_RECEIVE, default=0.0, only_in="0.5.21"),
    *_refused("free KV is not a count of tokens there", "enable-unified-memory"),
    *_refused(
        "the precondition's look-up may take a session's record away",
        "enable-streaming-session",
    ),
    *_refused("routers never close the sessions that pin KV", "enable-session-radix-cache"),
    *_refused(
        "the digest covers decoded tokens too, and fails behind a reply",
        "disaggregation-enable-kv-checksum",
        only_in="0.5.21",
    ),
    *_warned(
        "the time of loading KV back is not in the pacer's measurements",
        "enable-hierarchical-cache",
    ),
    *_warned("a local append is not looked up in storage", "hicache-storage-backend"),
    *_warned(
        "a local extend reads the quantized prefix; quality was never tried",
        "kv-cache-dtype",
        default="auto",
    ),
    *_unaffected(
        "read by SGLang's own methods",
        "num-reserved-decode-tokens",
        "disaggregation-decode-extra-slots",
        "disaggregation-decode-polling-interval",
    ),
    *_tried(
        "backups on the CPU; others only by reading", "disaggregation-decode-retraction-backup"
    ),
    # Models and what requests carry
    *_tried("slots count local and transferred turns together", "enable-lora"),
    *_refused(
        "it covers half of the requests", "enable-lora-overlap-loading", "lora-drain-wait-threshold"
    ),
    *_refused("the decode server would fetch images from the encoder again", "language-only"),
    *_unaffected(_UPSTREAM, "encoder-only"),
    *_unaffected("text alone is accepted", "language-model-only"),
    *_refused(
        "rows are read by KV slot, and transferred slots have none (state_capturer/base.py:183)",
        "enable-return-routed-experts",
        "enable-return-indexer-topk",
    ),
    *_warned(
        "there are none of the cached prefix",
        "enable-return-hidden-states",
        "enable-return-aux-hidden-states",
    ),
    *_unaffected("it sees two more keys in custom_params", "enable-custom-logit-processor"),
    *_warned(
        "the heartbeat's hooks run in no process then; routers must be given the worker",
        "tokenizer-worker-num",
        default=1,
    ),
    *_unaffected("output alone passes them", "detokenizer-worker-num"),
    *_unaffected("the server must be idle for it", "enable-memory-saver"),
    # Speculation; the algorithms are in engines.py
    *_refused("never tried", "enable-multi-layer-eagle"),
    *_warned("never tried", "speculative-adaptive", "speculative-use-rejection-sampling"),
    *_warned("never tried", "speculative-draft-window-size"),
)
