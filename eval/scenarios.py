"""``ppd-eval traffic scenarios``: the six of a post on NanoGPT, on a real engine.

"NanoGPT: Disaggregated Prefill and Decode" (czhou578.github.io/blog, 2026-06-16) compares
monolithic chunked prefill with disaggregation in six workloads of a handful of requests. Its model
holds 64 tokens; here all its token counts are multiplied. Its numbers of requests, batch limits and
chunk budgets running in ``disagg_prefill_results.txt`` of github.com/czhou578/nanoGPT-inference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from ppd.contract import Role
from ppd.errors import ConfigError

from . import tiny_model
from .cluster import launching
from .options import Commands, add_out, cluster_options
from .provenance import provenance
from .raw_rows import Write, appending
from .samples import columns
from .sides import RunningSides, Shape, Side, WorkerFlags, measure, start
from .traffic.conversations import Conversation, PlannedTurn

_TIMEOUT_S = 120.0
_KV = ("--max-total-tokens", "131072")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of the post's workloads, in the post's tokens.

    Attributes:
        batch: sequences that a worker decodes at once.
        budget: tokens of a chunk.
        apart_s: between arrivals. The post's all come at once, also the "staggered" ones.
    """

    name: str
    requests: int
    prompt: int
    reply: int
    batch: int
    budget: int
    apart_s: float = 0.0


SCENARIOS = (
    Scenario("smoke", 4, 16, 8, batch=4, budget=16),
    Scenario("staggered", 8, 24, 10, batch=4, budget=16, apart_s=0.1),
    Scenario("batch-pressure", 12, 16, 8, batch=2, budget=12),
    Scenario("long-prompts", 6, 40, 8, batch=4, budget=24),
    Scenario("long-decode", 6, 16, 32, batch=4, budget=16),
    Scenario("stress", 16, 16, 10, batch=4, budget=16),
)
NAMES = tuple(scenario.name for scenario in SCENARIOS)

_MIXED = "--enable-mixed-chunk"

ONE = Side("1R", Shape.ONE_REPLICA, "replica")
TWO = Side("2R", Shape.TWO_REPLICAS, "replica")
PD = Side("pd", Shape.DISAGGREGATED, "pd")
PPD = Side("ppd", Shape.DISAGGREGATED, "ppd")


def sides_of(turns: int) -> tuple[Side, ...]:
    """A conversation of one turn has no later turn for ``ppd`` to send elsewhere."""
    return (ONE, TWO, PD) if turns == 1 else (ONE, TWO, PD, PPD)


def plan(scenario: Scenario, turns: int, scale: int) -> list[Conversation]:
    """All turns alike; a later one follows its predecessor's reply at once."""
    turn = PlannedTurn(scenario.prompt * scale, scenario.reply * scale)
    return [
        Conversation(number * scenario.apart_s, (turn,) * turns, scenario.name)
        for number in range(scenario.requests)
    ]


def worker_flags(scenario: Scenario, scale: int) -> WorkerFlags:
    """Return the flags of a scenario's workers.

    Chunked prefill in the forwards of running decodes is what the post calls monolithic.
    """
    decoding = ("--max-running-requests", str(scenario.batch))
    chunk = ("--chunked-prefill-size", str(scenario.budget * scale))
    return WorkerFlags(
        _KV,
        {Role.DECODE: (*decoding, *chunk), Role.REPLICA: (*decoding, *chunk, _MIXED)},
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure.

    Attributes:
        scale: the post's tokens times this.
        turns: of each conversation; one run for each number.
    """

    scenarios: tuple[Scenario, ...]
    rounds: int
    scale: int
    turns: tuple[int, ...]


def add_to(commands: Commands) -> None:
    """Declare ``traffic scenarios``."""
    parser = commands.add_parser(
        "scenarios",
        parents=[cluster_options()],
        help="a post's six, monolithic against disaggregated",
        description=(
            "Serve six small workloads on one monolithic worker, on two, and on a prefill "
            "and a decode worker. The last line is one JSON object."
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--scenarios", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=int, default=16, help="factor of the workloads' token counts"
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2])
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table; the last line on stdout is one JSON object.

    Raises:
        ConfigError: an option makes no sense.
        ClusterError: a process did not start.
    """
    chosen = tuple(scenario for scenario in SCENARIOS if scenario.name in options.scenarios)
    wanted = Wanted(chosen, options.rounds, options.scale, tuple(options.turns))
    if min(wanted.rounds, wanted.scale, *wanted.turns) < 1:
        raise ConfigError("rounds, scale and turns must be at least 1")
    model = tiny_model.resolve(options.model)
    rows: list[dict[str, Any]] = []
    with appending(options.out) as write:
        for (_, _), group in groupby(sorted(wanted.scenarios, key=_server), key=_server):
            scenarios = list(group)
            with launching(options.logs) as launch:
                flags = worker_flags(scenarios[0], wanted.scale)
                sides = {side for turns in wanted.turns for side in sides_of(turns)}
                running = start(launch, model, sorted(sides, key=lambda side: side.name), flags)
                rows += uvloop.run(_measure(running, scenarios, wanted, Path(model).name, write))
    cells = summarize(rows)
    print(as_text(cells))
    print(json.dumps({"part": "scenarios", "cells": cells}))
    return 0


def _server(scenario: Scenario) -> tuple[int, int]:
    """Those that agree in it can be measured on the same workers."""
    return scenario.batch, scenario.budget


async def _measure(
    running: RunningSides, scenarios: Sequence[Scenario], wanted: Wanted, model: str, write: Write
) -> list[dict[str, Any]]:
    rows = []
    async with aiohttp.ClientSession() as http:
        vocabulary = await running.vocabulary(http)

        async def one(scenario: Scenario, turns: int, side: Side, number: int) -> dict[str, Any]:
            samples, summary = await measure(
                http,
                running,
                side,
                plan(scenario, turns, wanted.scale),
                content=f"{scenario.name}/{turns}/{number}",
                vocabulary=vocabulary,
                timeout_s=_TIMEOUT_S,
            )
            asked = {"part": "scenarios", **asdict(scenario), "scale": wanted.scale}
            asked |= {"turns": turns, "side": side.name, "shape": side.shape, "round": number}
            measured = asdict(summary) | {"samples": columns(samples)}
            return {**asked, "model": model, **measured, **provenance(number)}

        for side in running.routers:
            await one(scenarios[0], max(wanted.turns), side, -1)  # kernels warm up: not measured
        for number in range(wanted.rounds):
            for scenario, turns, side in _order(scenarios, wanted.turns, number):
                rows.append(await one(scenario, turns, side, number))
                write(rows[-1])
            names = ", ".join(scenario.name for scenario in scenarios)
            print(f"  {names}: round {number + 1} of {wanted.rounds}", file=sys.stderr, flush=True)
    return rows


def _order(
    scenarios: Sequence[Scenario], all_turns: Sequence[int], number: int
) -> Iterator[tuple[Scenario, int, Side]]:
    """Sides one after the other in every scenario; in turn the first and the last."""
    for scenario in scenarios:
        for turns in all_turns:
            sides = sides_of(turns)
            for side in sides if number % 2 == 0 else sides[::-1]:
                yield scenario, turns, side


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return medians over the rounds, in the post's order and columns."""
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["name"], row["turns"], row["side"]), []).append(row)
    return [
        {"scenario": name, "turns": turns, "side": side, **_cell(found[name, turns, side])}
        for turns in sorted({key[1] for key in found})
        for name in NAMES
        for side in (ONE.name, TWO.name, PD.name, PPD.name)
        if (name, turns, side) in found
    ]


def _cell(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def middle(turns: str, measured: str, of: str) -> float | None:
        spreads = [run["latencies"][turns][measured] for run in runs]
        values = [spread[of] for spread in spreads if spread is not None]
        return round(median(values), 2) if values else None

    return {
        "rounds": len(runs),
        "failed": sum(run["planned"] - run["ok"] for run in runs),
        "wall_s": round(median(run["wall_s"] for run in runs), 2),
        "tokens_per_s": round(median(run["output_tokens_per_s"] for run in runs), 1),
        "ttft_ms": middle("first", "ttft_ms", "mean"),
        "ttft_p90_ms": middle("first", "ttft_ms", "p90"),
        "later_ttft_ms": middle("later", "ttft_ms", "mean"),
        "tpot_ms": middle("all", "tpot_ms", "mean"),
        "itl_p99_ms": middle("all", "itl_ms", "p99"),
        "e2e_ms": middle("all", "e2e_ms", "mean"),
    }


RATIOS = ("tokens_per_s", "ttft_ms", "e2e_ms")
# What the post found, disaggregated against monolithic on one device: throughput, TTFT, latency.
POST = {
    "smoke": (0.60, 0.89, 0.96),
    "staggered": (1.42, 0.47, 0.57),
    "batch-pressure": (0.98, 0.83, 0.85),
    "long-prompts": (1.62, 0.26, 0.35),
    "long-decode": (1.13, 0.55, 0.68),
    "stress": (1.04, 0.73, 0.76),
}


def ratios(
    cells: Sequence[Mapping[str, Any]], turns: int, side: str, base: str, measured: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    """Return one side's figures as multiples of another's, by scenario."""
    of = {(c["scenario"], c["side"]): c for c in cells if c["turns"] == turns}
    return {
        name: tuple(of[name, side][key] / of[name, base][key] for key in measured)
        for name in NAMES
        if (name, side) in of and (name, base) in of
    }


_COLUMNS = (
    ("scenario", "scenario"),
    ("turns", "turns"),
    ("side", "side"),
    ("wall_s", "wall s"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_ms", "T1 TTFT"),
    ("ttft_p90_ms", "p90"),
    ("later_ttft_ms", "T2+ TTFT"),
    ("tpot_ms", "TPOT"),
    ("itl_p99_ms", "ITL p99"),
    ("e2e_ms", "E2E ms"),
    ("failed", "failed"),
)


def as_text(cells: Sequence[Mapping[str, Any]]) -> str:
    """Format the cells as a table."""
    lines = [[title for _, title in _COLUMNS]]
    lines += [
        ["-" if cell[key] is None else f"{cell[key]}" for key, _ in _COLUMNS] for cell in cells
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
