"""``ppd-eval profile measure``: steps of a model with random weights on this GPU, and a profile's.

A step is recorded as a CUDA graph and replayed, so its time is the device's. Scheduler, sampling
and memory management of an engine are not in it, as they are not in a profile.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton

from ppd.errors import ConfigError

from ..provenance import provenance
from ..raw_rows import appending
from .gpu_model import Attention, Dimensions, Llama, random_weights
from .profile import Extend, Profile, Step

_MODELS = {
    "Llama-3.1-8B": Dimensions(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head=128,
        inner=14336,
        vocabulary=128256,
    )
}
_POOL_TOKENS = 280_000  # of KV; with the weights they take 53 GB
_PROMPTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_APPENDED, _CACHED = (64, 128, 256, 512, 1024, 2048), (2048, 8192, 32768)
_DECODES = (
    *((1, context) for context in (1024, 8192, 32768)),
    *((8, context) for context in (1024, 8192)),
    *((32, context) for context in (1024, 8192)),
    *((64, context) for context in (1024, 4096)),
    *((128, context) for context in (1024, 2048)),
    (200, 1024),
)
_BESIDE = ((32, 4096), (64, 2048), (64, 4096), (128, 1024), (200, 1024))
_MIXED = (64, 256, 1024)  # new tokens beside decodes, after _MIXED_CACHED
_MIXED_CACHED = 4096
_MOST_TOKENS = max(_PROMPTS)  # of a step
_WAYS = (Attention.FLASH, Attention.CUDNN)
_REPEATS = 9


def shapes() -> Iterator[Step]:
    """Yield the shapes that are measured: prompts, appends, decodes, and appends beside decodes."""
    for new in _PROMPTS:
        yield Step((Extend(new, 0),))
    for cached in _CACHED:
        for new in _APPENDED:
            yield Step((Extend(new, cached),))
    for sequences, context in _DECODES:
        yield Step((), sequences, sequences * context)
    for sequences, context in _BESIDE:
        for new in _MIXED:
            yield Step((Extend(new, _MIXED_CACHED),), sequences, sequences * context)


def run(profile: Profile, out: Path | None, layers: int | None) -> int:
    """Measure all shapes; the last line on stdout is one JSON object.

    Args:
        profile: whose times are written beside the measured ones.
        out: file of raw rows.
        layers: number of layers, for a trial; None for the model's.

    Raises:
        ConfigError: PyTorch finds no CUDA device, or the profile's model cannot be measured.
    """
    if not torch.cuda.is_available():
        raise ConfigError("profile measure: PyTorch finds no CUDA device")
    file = profile.file
    if file.model not in _MODELS or file.tensor_parallel != 1:
        raise ConfigError(
            f"profile measure: {file.name} is of {file.model} on {file.tensor_parallel} GPUs; "
            f"what can be measured is {', '.join(_MODELS)} on one GPU"
        )
    of = _MODELS[file.model]
    of = replace(of, layers=layers or of.layers)
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Llama(of, random_weights(of, device), _POOL_TOKENS)
    ids = torch.randint(of.vocabulary, (_MOST_TOKENS,), device=device)
    origin = {
        **provenance(0),
        **profile.provenance(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "layers": of.layers,
    }
    ratios = []
    with appending(out) as write:
        for step in shapes():
            times = {way: _times_ms(model, step, way, ids) for way in _WAYS}
            way = min(times, key=lambda way: statistics.median(times[way]))
            measured_ms, profile_ms = statistics.median(times[way]), profile.step_ms(step)
            ratios.append(measured_ms / profile_ms)
            row = {
                "extends": [(one.new_tokens, one.cached_tokens) for one in step.extends],
                "sequences": step.sequences,
                "context_tokens": step.context_tokens,
                "attention": way,
                "measured_ms": round(measured_ms, 4),
                "profile_ms": round(profile_ms, 4),
                "repeats_ms": {way: [round(ms, 4) for ms in of] for way, of in times.items()},
            }
            write(origin | row)
            print_step(row)
    summary = {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}
    print(json.dumps({"steps": len(ratios), "measured_to_profile": summary}))
    return 0


def print_step(row: dict[str, object]) -> None:
    """Print a step to stderr, because the last line of stdout is the result."""
    names = ("extends", "sequences", "context_tokens", "attention", "measured_ms", "profile_ms")
    print(*(f"{name} {row[name]}" for name in names), sep="  ", file=sys.stderr, flush=True)


def _times_ms(model: Llama, step: Step, way: Attention, ids: torch.Tensor) -> list[float]:
    """Record a step and replay it; returns the milliseconds of each replay."""
    run = model.prepared(step, way)
    mine = ids[: step.new_tokens + step.sequences]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run(mine)  # compiles and loads kernels, which cannot be recorded
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(mine)
    graph.replay()
    times_ms = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return times_ms
