"""``ppd-eval simulate first-turns``: what first turns gain if KV is sent while it is computed.

The workers are idle, and nothing but steps and the link takes time, so every gain is an upper bound
of it. SGLang sends the KV of a chunk when the chunk is computed. Smaller chunks send earlier, but
take longer. A transfer pipelined by layer sends each layer's part of a chunk when that layer is
computed, as Perplexity's KV messenger does; a layer takes an equal part of its step.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ppd.errors import ConfigError

from ..options import Commands, add_out
from ..profiles.profile import Extend, Profile, Step, load_profile
from ..provenance import provenance
from ..raw_rows import append_whole
from ..traffic.workloads import Demand, plan
from .planned import simulated

CHUNKS = (8192, 4096, 2048, 1024, 512)  # the first is SGLang's own on a GPU of 80 GB
_FOLDERS = re.compile(r"[^:?]*/")
_LAYERS = {"Llama-3.1-8B": 32, "Qwen3-32B": 64, "DeepSeek-V3": 61}


def add_to(commands: Commands) -> None:
    """Declare ``simulate first-turns``."""
    parser = commands.add_parser(
        "first-turns",
        help="transfers pipelined by smaller chunks, or by layer",
        description=(
            "Compute the TTFT of first turns on idle workers, with KV sent by chunk and by layer. "
            "The last line is one JSON object."
        ),
    )
    parser.add_argument("--profiles", nargs="+", required=True, help="of 'profile list'")
    parser.add_argument("--links-gbps", type=float, nargs="+", default=[25.0, 100.0, 400.0])
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768]
    )
    parser.add_argument("--tokenizer", type=Path, help="of the model; for workloads that are text")
    parser.add_argument("--workload", help="as of 'load'; the mean over its first turns, too")
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a row for each profile, link and prompt, and print the largest gain of layers.

    Raises:
        ConfigError: an option, the workload or a profile is wrong, or a profile's model has no
            number of layers here.
        OutsideProfileError: a prompt lies beyond twice the range of a profile.
    """
    if not min(*options.links_gbps, *options.prompts, math.inf) > 0:
        raise ConfigError("links and prompts must be above 0")
    profiles = [load_profile(name) for name in options.profiles]
    groups = {f"{prompt}": [prompt] for prompt in options.prompts}
    if options.workload:
        # Any rate will do: the workers are idle.
        planned = plan(Demand(options.workload, qps=1.0, tokenizer=options.tokenizer))
        first = [one.turns[0].new for one in simulated(planned, end_at_cuts=True)]
        groups["workload"] = first
    if not groups:
        raise ConfigError("no prompts and no workload are given")
    rows = [
        {
            "row": "first turns",
            **profile.provenance(),
            "link_gbps": gbps,
            "prompts": name,
            "workload": _FOLDERS.sub("", options.workload) if name == "workload" else None,
            **times(profile, gbps, prompts),
            **provenance(0),
        }
        for profile in profiles
        for gbps in options.links_gbps
        for name, prompts in groups.items()
    ]
    if options.out is not None:
        append_whole(options.out, rows)
    largest = {
        f"{gbps:g}": max(row["layers_gain"] for row in rows if row["link_gbps"] == gbps)
        for gbps in options.links_gbps
    }
    print(json.dumps({"rows": len(rows), "largest_gain_of_layers": largest}))
    return 0


def times(profile: Profile, gbps: float, prompts: Sequence[int]) -> dict[str, Any]:
    """Return the mean TTFT of prompts by size of chunk, without and with layers.

    Args:
        profile: the times of steps.
        gbps: gigabits a second of the link.
        prompts: tokens of each.

    Raises:
        ConfigError: the layers of the profile's model are not known.
    """
    layers = _LAYERS.get(profile.file.model)
    if layers is None:
        known = ", ".join(sorted(_LAYERS))
        raise ConfigError(f"the layers of {profile.file.model} are not known, but of {known}")

    def mean_ms(chunk: int, layers: int = 1) -> float:
        return fmean(ttft_ms(profile, gbps, prompt, chunk, layers) for prompt in prompts)

    by_chunk = {size: mean_ms(size) for size in CHUNKS}
    by_layer = {size: mean_ms(size, layers) for size in CHUNKS}
    best = min(CHUNKS, key=by_chunk.__getitem__)
    return {
        "prompt_tokens": fmean(prompts),
        "turns": len(prompts),
        "layers": layers,
        "transfer_ms": round(fmean(profile.transfer_ms(prompt, gbps) for prompt in prompts), 3),
        "chunks_ms": {f"{size}": round(ms, 3) for size, ms in by_chunk.items()},
        "layers_ms": {f"{size}": round(ms, 3) for size, ms in by_layer.items()},
        "best_chunk": best,
        "chunks_gain": round(1 - by_chunk[best] / by_chunk[CHUNKS[0]], 4),
        "layers_gain": round(1 - min(by_layer.values()) / by_chunk[best], 4),
    }


def ttft_ms(profile: Profile, gbps: float, prompt: int, chunk: int, layers: int = 1) -> float:
    """Return when the last KV of a prompt has arrived; the prefill begins at 0.

    Args:
        profile: the times of steps.
        gbps: gigabits a second of the link, which sends one part after the other.
        prompt: tokens.
        chunk: most tokens of a step.
        layers: parts of a step whose KV is sent by itself.
    """
    computed_ms = sent_ms = 0.0
    for cached in range(0, prompt, chunk):
        new = min(chunk, prompt - cached)
        part_ms = profile.step_ms(Step((Extend(new, cached),))) / layers
        part_sent_ms = profile.transfer_ms(new, gbps) / layers
        for _ in range(layers):
            computed_ms += part_ms
            sent_ms = max(sent_ms, computed_ms) + part_sent_ms
    return sent_ms
