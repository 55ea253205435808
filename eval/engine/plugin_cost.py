"""``ppd-eval plugin-cost``: what the plugin costs a decode worker that takes no local turn.

Three decode workers behind one prefill worker, on one core or each on its GPU: with the plugin, as
SGLang comes with a radix cache on the decode worker, and as it comes without. In each round every
one of them decodes the same number of remote requests, in an order that is drawn.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from ppd.contract import Role

from .. import tiny_model
from ..cluster import Launcher, Process, gpu_flags, launching, wait_all
from ..endpoints import vocabulary_of
from ..provenance import provenance
from ..raw_rows import appending
from .client import EngineClient, bootstrap_port_of, gaps_ms

PLUGIN, RADIX, PLAIN = "plugin", "sglang_radix", "sglang"
_PLAIN = ("--ppd-plain",)
_FLAGS = {
    PLUGIN: (),
    # As ``ppd-worker`` has it, but without the plugin.
    RADIX: (*_PLAIN, "--disaggregation-decode-enable-radix-cache", "--enable-mixed-chunk"),
    PLAIN: _PLAIN,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """``decodes`` requests at once, of ``context`` and ``output`` tokens."""

    rounds: int = 8
    decodes: int = 6
    context: int = 512
    output: int = 200


def run(scene: Scene, model: str | None, out: Path | None, logs: Path) -> int:
    """Measure, append raw rows to ``out``; the last line on stdout is JSON. Ratios are the plugin's
    TPOT over the other's, round by round.
    """
    path = tiny_model.resolve(model)
    with appending(out) as write, launching(logs) as launch:
        prefill, decode = _start(launch, path)
        tpot_ms = asyncio.run(_measure(scene, prefill, decode))
        origin = {"model": Path(path).name, **asdict(scene), **provenance(0)}
        for way, rounds in tpot_ms.items():
            write({"way": way, "tpot_ms": rounds, **origin})
    medians = {way: statistics.median(rounds) for way, rounds in tpot_ms.items()}
    told: dict[str, float] = {f"{way}_tpot_ms": round(ms, 3) for way, ms in medians.items()}
    for way in (RADIX, PLAIN):
        pairs = zip(tpot_ms[PLUGIN], tpot_ms[way], strict=True)
        told[f"ratio_to_{way}"] = round(statistics.median(a / b for a, b in pairs), 3)
    print(json.dumps(told))
    return 0


def _start(launch: Launcher, model: str) -> tuple[Process, dict[str, Process]]:
    prefill_gpu = gpu_flags(0, 1 + len(_FLAGS))
    cores = (None, None) if prefill_gpu else (0, 1)
    prefill = launch.worker(Role.PREFILL, model, *prefill_gpu, core=cores[0])
    decode = {
        way: launch.worker(
            Role.DECODE, model, *flags, *gpu_flags(n, 1 + len(_FLAGS)), name=way, core=cores[1]
        )
        for n, (way, flags) in enumerate(_FLAGS.items(), 1)
    }
    wait_all([prefill, *decode.values()])
    return prefill, decode


async def _measure(
    scene: Scene, prefill: Process, decode: dict[str, Process]
) -> dict[str, list[float]]:
    """Mean gap between a request's tokens while all of them decode, by way and round."""
    source = random.Random(0)
    tpot_ms: dict[str, list[float]] = {way: [] for way in decode}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        port = await bootstrap_port_of(http, prefill.url)
        vocabulary = await vocabulary_of(http, prefill.url)
        for number in range(-1, scene.rounds):  # the first only warms up
            for way in source.sample(sorted(decode), len(decode)):
                client = EngineClient(http, prefill.url, decode[way].url, port, source)
                prompts = [
                    source.choices(vocabulary, k=scene.context) for _ in range(scene.decodes)
                ]
                replies = await asyncio.gather(
                    *(client.remote(prompt, scene.output) for prompt in prompts)
                )
                begun_s = max(reply.arrived_s[0] for reply in replies)
                ended_s = min(reply.arrived_s[-1] for reply in replies)
                gaps = [gap for reply in replies for gap in gaps_ms(reply, begun_s, ended_s)]
                if number >= 0:
                    tpot_ms[way].append(round(statistics.fmean(gaps), 3))
    return tpot_ms
