"""The check of SGLang's flags on a decode server that takes local prefills.

A flag is refused if local prefill cannot work with it, or would fail without an error. A flag is
warned about if upstream's own code should support it, but no test covers it. docs/REFERENCE.md
lists both.
"""

from __future__ import annotations

import logging
from typing import Any

from ppd.errors import ConfigError

logger = logging.getLogger("ppd.engine")

_REFUSED: tuple[tuple[str, Any], ...] = (
    ("enable_dp_attention", False),
    ("dp_size", 1),  # a turn must reach the rank that holds its KV
    ("attn_dp_size", 1),  # what 0.5.23 calls enable_dp_attention
    ("pp_size", 1),
    ("enable_hisparse", False),
    ("dllm_algorithm", None),
    ("enable_pd_role_switch", False),
)
_UNTRIED: tuple[tuple[str, Any], ...] = (
    ("enable_lora", None),
    ("enable_hierarchical_cache", False),
    ("enable_lmcache", False),
    ("tokenizer_worker_num", 1),
    ("disaggregation_decode_enable_offload_kvcache", False),
)


def check_flags(server_args: Any, speculative_algorithms: frozenset[str] = frozenset()) -> None:
    """Refuse unsupported flags, and warn about untested ones.

    Args:
        server_args: SGLang's ``ServerArgs``.
        speculative_algorithms: those that are supported on the installed SGLang.

    Raises:
        ConfigError: a flag is not supported, or a required one is missing. The message names all.
    """
    wrong = [f"{flag} is not supported with PPD_ENABLE=1" for flag in _given(server_args, _REFUSED)]
    if not server_args.disaggregation_decode_enable_radix_cache:
        wrong.append("--disaggregation-decode-enable-radix-cache is missing: nothing to append to")
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if algorithm is not None and algorithm not in speculative_algorithms:
        supported = " and ".join(sorted(speculative_algorithms)) or "none"
        wrong.append(
            f"--speculative-algorithm {algorithm} is not supported with PPD_ENABLE=1 on this "
            f"SGLang; supported: {supported}"
        )
    if wrong:
        raise ConfigError("; ".join(wrong))
    for flag in _given(server_args, _UNTRIED):
        logger.warning("local prefill was never tried with %s", flag)


def _given(server_args: Any, flags: tuple[tuple[str, Any], ...]) -> list[str]:
    return [
        f"--{name.replace('_', '-')}"
        for name, default in flags
        if (getattr(server_args, name, default) or None) != (default or None)
    ]
