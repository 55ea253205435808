"""``ppd-eval table weights``: the share of local turns as the weights move (Figure 5).

The figure is the PPD paper's. One cluster, one mix of workloads over all cells of a sweep's grid,
one router with its table and no corrections; only the weights that each request brings differ, from
TPOT alone to TTFT alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp

from .. import tiny_model
from ..client import hold
from ..cluster import Process, launching, wait_all
from ..endpoints import empty_caches, vocabulary_of
from ..options import Commands, cluster_options
from ..provenance import provenance
from ..raw_rows import appending
from ..samples import Sample
from ..sweep.clusters import router, start_workers
from ..sweep.config import SweepConfig, load_config
from ..traffic.conversations import Conversation

_STEPS = 11
_COLUMNS = "{:>7} {:>7} {:>6} {:>12} {:>9} {:>9} {:>9} {:>9}"


@dataclass(frozen=True, slots=True)
class Mix:
    """Conversations of all kinds; ``grid`` names the sweep's file, ``qps`` is in turns a second."""

    grid: str
    conversations: int
    qps: float
    seed: int


def plan(config: SweepConfig, mix: Mix) -> list[Conversation]:
    """Return conversations with Poisson arrivals, each of a random workload of the grid."""
    source = random.Random(mix.seed)
    workloads = list(config.workloads())
    conversations, at_s = [], 0.0
    for _ in range(mix.conversations):
        planned = config.planned_turns(source.choice(workloads), source)
        conversations.append(Conversation(at_s, planned))
        at_s += source.expovariate(mix.qps / config.turns)
    return conversations


def add_to(commands: Commands) -> None:
    """Declare ``table weights``."""
    parser = commands.add_parser(
        "weights",
        parents=[cluster_options()],
        help="share of local turns as the weights move",
        description="Measure the share of local turns on a real cluster, as the weights move.",
    )
    parser.add_argument(
        "config", type=Path, help="configuration of a sweep: the mix is drawn from its cells"
    )
    parser.add_argument("--table", type=Path, help="default: the shipped one of the model")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--qps", type=float, default=3.0, help="turns a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSONL; is continued")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, append a row for each step."""
    config, table, logs = load_config(options.config), options.table, options.logs
    mix = Mix(options.config.name, options.conversations, options.qps, options.seed)
    logs.mkdir(parents=True, exist_ok=True)
    no_corrections = logs / "weights-router.toml"
    no_corrections.write_text("corrections = []\n")
    path = tiny_model.resolve(options.model)
    with appending(options.out) as write, launching(logs) as launch:
        at, workers = start_workers(launch, config, path)
        flags = ["--config", str(no_corrections), *(["--table", str(table)] if table else [])]
        front = router(launch, at, *flags)
        wait_all([front])

        def measured(row: dict[str, object]) -> None:
            write({**row, "mix": asdict(mix), "model": Path(path).name, **provenance(mix.seed)})

        rows = asyncio.run(_measure(config, mix, workers, front, measured))
    print(json.dumps({"local_share": [row["local_share"] for row in rows]}))
    return 0


async def _measure(
    config: SweepConfig,
    mix: Mix,
    workers: list[Process],
    router: Process,
    measured: Callable[[dict[str, object]], None],
) -> list[dict[str, object]]:
    conversations = plan(config, mix)
    urls = [worker.url for worker in workers]
    rows: list[dict[str, object]] = []
    head = (
        "w_ttft",
        "w_tpot",
        "local",
        "later turns",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
    )
    print(_COLUMNS.format(*head))
    async with aiohttp.ClientSession() as http:
        vocabulary = await vocabulary_of(http, urls[-1])
        warm = plan(config, replace(mix, conversations=4, seed=mix.seed + 1))
        await hold(router.url, warm, seed="warm", vocabulary=vocabulary)
        for step in range(_STEPS):
            w_ttft = step / (_STEPS - 1)
            headers = {"X-PPD-W-TTFT": f"{w_ttft:g}", "X-PPD-W-TPOT": f"{1 - w_ttft:g}"}
            await empty_caches(http, urls)
            samples = await hold(
                router.url,
                conversations,
                seed=f"{mix.seed}/{step}",
                vocabulary=vocabulary,
                headers=headers,
            )
            rows.append(_row(w_ttft, samples))
            measured(rows[-1])
            print(_COLUMNS.format(*(list(rows[-1].values())[:8])), flush=True)
    return rows


def _row(w_ttft: float, samples: list[Sample]) -> dict[str, object]:
    later = [sample for sample in samples if sample.turn > 1 and not sample.error]
    ttft = sorted(sample.ttft_ms for sample in later)
    tpot = sorted(sample.tpot_ms for sample in later)
    local = [sample for sample in later if sample.route == "local"]
    return {
        "w_ttft": w_ttft,
        "w_tpot": round(1 - w_ttft, 6),
        "local_share": round(len(local) / len(later), 3),
        "later_turns": len(later),
        "ttft_p50_ms": round(statistics.median(ttft), 1),
        "ttft_p99_ms": round(ttft[int(0.99 * len(ttft))], 1),
        "tpot_p50_ms": round(statistics.median(tpot), 2),
        "tpot_p99_ms": round(tpot[int(0.99 * len(tpot))], 2),
        "failed": sum(bool(sample.error) for sample in samples),
        "by_reason": {
            reason: sum(sample.reason == reason for sample in later)
            for reason in sorted({sample.reason for sample in later})
        },
    }
