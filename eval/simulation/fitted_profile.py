"""The cost model that was fitted to the paper's machine, as a profile.

A profile adds up tables, while the model has the larger of computing and reading the weights. So a
small prefill comes out a little longer in a profile. The file has the errors.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import msgspec

from ..profiles.files import (
    FORMAT,
    Calibration,
    Host,
    Interpolation,
    ProfileFile,
    Source,
    Tables,
)
from ..profiles.profile import Extend as ProfileExtend
from ..profiles.profile import Profile, Step
from .cost_model import CostModel, Extend

NAME = "llama-3.1-8b-h100-vllm"
_DEVICE = Calibration("device", 1.0, 0.0, "step times of the engine, its CPU time included")
_TOKENS = tuple(
    sorted({2**k for k in range(16)} | {3 * 2**k for k in range(4, 14)} | {160, 200, 224, 320, 448})
)
_CACHED = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 180, 192, 256)
_CONTEXT = (1, *_CACHED[1:])
_CHECKED_STEPS = 200


def fitted_profile(model: CostModel) -> ProfileFile:
    """Return a cost model as a profile, with its interpolation checked."""
    serving = model.serving
    file = ProfileFile(
        format=FORMAT,
        name=NAME,
        model=model.model.name,
        gpu=model.gpu.name,
        tensor_parallel=1,
        kv_bytes_per_token=model.model.kv_bytes_per_token,
        kv_pool_tokens=model.kv_capacity_tokens,
        kv_pool=(
            f"{serving.memory_used_share:.0%} of the memory, less weights and "
            f"{serving.activation_bytes / 1e9:g} GB of activations"
        ),
        links_gbps=(round(serving.link_bytes_per_s * 8 / 1e9, 3),),
        source=Source(
            package="sglang-ppd",
            version="ppd-eval simulate calibrate",
            license="Apache-2.0",
            attribution="fitted to measurements of the PPD paper's authors",
            url="https://github.com/freelulul/vllm-ppd",
            model=model.model.name,
            system=model.gpu.name,
            backend="vllm",
            backend_version="that of the paper",
            options={},
        ),
        interpolation=Interpolation("", 0, 0, 0.0, 0.0, 0.0, ""),
        calibrations=(_DEVICE,),
        tables=_tables(model),
        host=Host(serving.request_ms, serving.handover_ms, model.overlap),
    )
    return msgspec.structs.replace(file, interpolation=_compared(file, model))


def _tables(model: CostModel) -> Tables:
    serving = model.serving

    def rest_ms(tokens: int) -> float:
        return serving.step_ms + max(tokens * model.token_ms, model.weights_ms)

    def attention_ms(new: int, cached: int) -> float:
        return Extend(new, cached).pairs * model.pair_ms + cached * model.context_ms

    def decode_ms(sequences: int, context: int) -> float:
        return sequences * (serving.sequence_ms + context * model.context_ms)

    return Tables(
        step_tokens=_TOKENS,
        step_ms=tuple(_rounded(rest_ms(tokens)) for tokens in _TOKENS),
        new_tokens=_TOKENS,
        cached_tokens=_CACHED,
        extend_ms=tuple(
            tuple(_rounded(attention_ms(new, cached)) for cached in _CACHED) for new in _TOKENS
        ),
        sequences=_SEQUENCES,
        decode_step_ms=tuple(_rounded(rest_ms(sequences)) for sequences in _SEQUENCES),
        context_tokens=_CONTEXT,
        decode_ms=tuple(
            tuple(_rounded(decode_ms(sequences, context)) for context in _CONTEXT)
            for sequences in _SEQUENCES
        ),
    )


def _rounded(ms: float) -> float:
    return float(f"{ms:.6g}")


def _compared(file: ProfileFile, model: CostModel) -> Interpolation:
    profile = Profile(file, _DEVICE)
    errors = sorted(
        (abs(profile.step_ms(step) / ms - 1), name) for step, ms, name in _random_steps(model)
    )
    only = [error for error, _ in errors]
    return Interpolation(
        method="linear between the points; compared with the fitted model at shapes drawn "
        "log-uniformly from the range",
        steps=len(errors),
        seed=0,
        median_error=round(statistics.median(only), 5),
        p99_error=round(only[int(0.99 * len(only))], 5),
        max_error=round(only[-1], 5),
        worst=errors[-1][1],
    )


def _random_steps(model: CostModel) -> Iterator[tuple[Step, float, str]]:
    source = random.Random(0)

    def drawn(most: int) -> int:
        return int(most ** source.random())

    for _ in range(_CHECKED_STEPS // 2):
        new, cached = drawn(_TOKENS[-1]), drawn(_CACHED[-1])
        step = Step((ProfileExtend(new, cached),))
        yield step, model.step_ms(0, 0, [Extend(new, cached)]), f"{new} new after {cached}"
        sequences, context = drawn(_SEQUENCES[-1]), drawn(_CONTEXT[-1])
        held = sequences * context
        yield (
            Step((), sequences, held),
            model.step_ms(sequences, held, []),
            f"{sequences} decodes at {context}",
        )
