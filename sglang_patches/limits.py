"""The check of a decode server that takes local prefills: its flags, and its kind of model.

A flag or a model is refused if local prefill cannot work with it, or would be wrong without an
error. It is warned about if upstream's own code should support it, but no test covers it.
``flags.py`` lists the flags.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppd.errors import ConfigError
from sglang_patches.flags import FLAGS, Flag, Verdict

logger = logging.getLogger("ppd.engine")


@dataclass(frozen=True, slots=True)
class Property:
    """What a scheduler is after its start, by its model and its flags.

    Attributes:
        name: in words.
        holds: whether a scheduler has the property, given it and its resolved arguments.
        verdict: refused, or warned about.
        reason: why, in one sentence.
    """

    name: str
    holds: Callable[[Any, Any], bool]
    verdict: Verdict
    reason: str


def _has_sliding_window(scheduler: Any, _: Any) -> bool:
    return bool(scheduler.is_hybrid_swa or scheduler.tp_worker.is_hybrid_swa)


def _has_states(scheduler: Any, _: Any) -> bool:
    return bool(scheduler.is_hybrid_ssm or scheduler.tree_cache.supports_mamba())


def _speculates_in_step(scheduler: Any, resolved: Any) -> bool:
    """Whether ranks that run their steps together decode speculatively."""
    return bool(scheduler.require_mlp_sync and resolved.speculative_algorithm)


def _expands_cached_latents(scheduler: Any, resolved: Any) -> bool:
    """Whether MLA attends long cached prefixes in chunks, which these backends lack."""
    backend = resolved.prefill_attention_backend or resolved.attention_backend
    is_mla = getattr(scheduler.model_config.attention_arch, "name", "") == "MLA"
    may_expand = not resolved.disable_chunked_prefix_cache
    return is_mla and backend in ("flashinfer", "flashmla") and may_expand


PROPERTIES: tuple[Property, ...] = (
    Property(
        "sliding-window attention (Gemma 3, gpt-oss, Llama 4, DeepSeek-V4)",
        _has_sliding_window,
        Verdict.REFUSED,
        "the room of a chunk is counted in KV of full attention alone",
    ),
    Property(
        "Mamba and linear attention (Qwen3-Next, Kimi-Linear, Nemotron-H)",
        _has_states,
        Verdict.REFUSED,
        "state slots are not counted before a chunk, and running out of them ends the process "
        "(mem_cache/allocation.py:341)",
    ),
    Property(
        "chunked prefill that is off, by --chunked-prefill-size -1 or by the model",
        lambda scheduler, _: scheduler.chunked_prefill_size is None,
        Verdict.REFUSED,
        "appends are prefilled in chunks, and some models cannot be (model_hook.py:1024)",
    ),
    Property(
        "prefill aligned to blocks (--enable-deterministic-inference on some backends, DSA pools)",
        lambda scheduler, _: scheduler.truncation_align_size is not None,
        Verdict.REFUSED,
        "a chunk smaller than a block never starts (schedule_policy.py:1659)",
    ),
    Property(
        "a cache without prefixes",
        lambda scheduler, _: scheduler.disable_radix_cache,
        Verdict.REFUSED,
        "there is nothing to append to",
    ),
    Property(
        "n-gram embeddings (LongCat)",
        lambda scheduler, _: scheduler.use_ngram_embedding,
        Verdict.REFUSED,
        "tokens of mixed chunks do not reach their table (ngram_embedding_manager.py:133)",
    ),
    Property(
        "MLA on FlashInfer or FlashMLA without --disable-chunked-prefix-cache",
        _expands_cached_latents,
        Verdict.REFUSED,
        "an append to 8,192 cached tokens ends the process (flashinfer_mla_backend.py:242)",
    ),
    Property(
        "DP attention with speculation",
        _speculates_in_step,
        Verdict.REFUSED,
        "it synchronizes a step more than once (dp_attn.py:501), which was never tried",
    ),
    Property(
        "images, audio and video in requests",
        lambda scheduler, _: scheduler.model_config.is_multimodal,
        Verdict.WARNED,
        "a local turn that carries them is refused and goes remote; turns of text are local",
    ),
)


def check_flags(
    resolved: Any, version: str, speculative_algorithms: frozenset[str] = frozenset()
) -> None:
    """Refuse unsupported flags, and warn about untested ones.

    Args:
        resolved: SGLang's ``ServerArgs`` as they are after resolution: ``NEXTN`` has become
            ``EAGLE``, and ``--lora-paths`` has set ``enable_lora``.
        version: of the installed SGLang.
        speculative_algorithms: those that are supported on it.

    Raises:
        ConfigError: a flag is not supported, or a required one is missing. The message names all.
    """
    given = [f for f in FLAGS if f.only_in in (None, version) and f.given_in(resolved)]
    wrong = [
        f"--{flag.name} is not supported with PPD_ENABLE=1: {flag.reason}"
        for flag in given
        if flag.verdict is Verdict.REFUSED
    ]
    if not resolved.disaggregation_decode_enable_radix_cache:
        wrong.append("--disaggregation-decode-enable-radix-cache is missing: nothing to append to")
    algorithm = getattr(resolved, "speculative_algorithm", None)
    if algorithm is not None and algorithm not in speculative_algorithms:
        supported = " and ".join(sorted(speculative_algorithms)) or "none"
        wrong.append(
            f"--speculative-algorithm {algorithm} is not supported with PPD_ENABLE=1 on this "
            f"SGLang; supported: {supported}"
        )
    if wrong:
        raise ConfigError("; ".join(wrong))
    for flag in given:
        if flag.verdict is Verdict.WARNED:
            logger.warning("--%s with local prefill: %s", flag.name, flag.reason)


def check_properties(scheduler: Any, resolved: Any) -> None:
    """Refuse models and combinations that only the started scheduler shows, and warn.

    Args:
        scheduler: SGLang's scheduler.
        resolved: its ``ServerArgs`` as they are after resolution.

    Raises:
        ConfigError: local prefill cannot work with one of them. The message names all.
    """
    found = [property for property in PROPERTIES if property.holds(scheduler, resolved)]
    wrong = [p for p in found if p.verdict is Verdict.REFUSED]
    if wrong:
        raise ConfigError(
            "; ".join(f"not supported with PPD_ENABLE=1: {p.name}: {p.reason}" for p in wrong)
        )
    for property in found:
        logger.warning("local prefill with %s: %s", property.name, property.reason)


def flags_by_verdict(verdict: Verdict) -> list[Flag]:
    """The flags of one verdict, in order of their names."""
    return sorted((f for f in FLAGS if f.verdict is verdict), key=lambda flag: flag.name)
