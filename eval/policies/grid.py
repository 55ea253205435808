"""``ppd-eval traffic policy-grid``: all policies side by side, over load and number of turns.

The same plans with the same seeds on the same two cores: two replicas, or one prefill and one
decode worker under each of the other policies. One raw row a run, its turns in columns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from ppd.errors import ConfigError

from .. import tiny_model
from ..cluster import launching
from ..options import Commands, cluster_options
from ..provenance import provenance
from ..raw_rows import Write, appending, read_rows
from ..samples import columns
from ..sides import RunningSides, Shape, Side, WorkerFlags, measure, start
from ..traffic.conversations import Conversation
from ..traffic.workloads import Demand, plan
from .cells import as_text, summarize

SIDES = (
    Side("replica", Shape.TWO_REPLICAS, "replica"),
    *(
        Side(policy, Shape.DISAGGREGATED, policy)
        for policy in ("pd", "partial:0.5", "full", "threshold", "ppd")
    ),
)
_FLAGS = WorkerFlags(("--max-total-tokens", "131072"))


@dataclass(frozen=True, slots=True)
class Point:
    """One place in the grid.

    Attributes:
        qps: conversations that begin in a second.
    """

    qps: float
    turns: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A cross: all rates at ``fixed_turns``, all numbers of turns at ``fixed_qps``.

    Attributes:
        first, new, reply: tokens of a first turn, of what a later one adds, of every reply.
        think_s: mean pause before a later turn.
        arrivals_s: for so long conversations begin.
        timeout_s: a turn that takes longer has failed.
    """

    qps: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    turns: tuple[int, ...] = (2, 4, 8, 16)
    fixed_qps: float = 2.0
    fixed_turns: int = 4
    first: int = 1024
    new: int = 64
    reply: int = 32
    think_s: float = 0.3
    arrivals_s: float = 6.0
    timeout_s: float = 10.0

    @property
    def digest(self) -> str:
        """A hash of all that a measured row depends on; a grid may get more points."""
        points = {"qps", "turns", "fixed_qps", "fixed_turns"}
        fields = {name: value for name, value in asdict(self).items() if name not in points}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]

    def points(self) -> Iterator[Point]:
        """Yield all points."""
        over_qps = [Point(qps, self.fixed_turns) for qps in self.qps]
        over_turns = [Point(self.fixed_qps, turns) for turns in self.turns]
        yield from dict.fromkeys([*over_qps, *over_turns])

    def plan(self, point: Point, seed: int) -> list[Conversation]:
        """Return the conversations of a point and seed; they are the same for all sides."""
        sizes = f"first={self.first}&first_out={self.reply}&new={self.new}&out={self.reply}"
        spec = f"turns:{point.turns}?{sizes}&think_s={self.think_s}"
        count = max(1, round(point.qps * self.arrivals_s))
        return plan(Demand(spec, conversations=count, qps=point.qps, seed=seed))


Key = tuple[str, Point, int]  # side, point, seed


def add_to(commands: Commands) -> None:
    """Declare ``traffic policy-grid``."""
    default = Grid()
    parser = commands.add_parser(
        "policy-grid",
        parents=[cluster_options()],
        help="all policies side by side, equal seeds",
        description=(
            "Measure all policies with equal seeds, over QPS and turns. It continues what "
            "the file of raw rows holds. The last line is one JSON object."
        ),
    )
    parser.set_defaults(run=run)
    names = [side.name for side in SIDES]
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--qps", type=float, nargs="+", default=default.qps)
    parser.add_argument("--turns", type=int, nargs="+", default=default.turns)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arrivals-s", type=float, default=default.arrivals_s)
    parser.add_argument(
        "--timeout-s", type=float, default=default.timeout_s, help="time limit of a turn"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL of raw rows; is continued")


def run(options: argparse.Namespace) -> int:
    """Measure what ``--out`` does not hold; the last line on stdout is one JSON object.

    Raises:
        ConfigError: an option makes no sense, or the file holds something else.
        ClusterError: a process did not start.
    """
    grid = Grid(
        qps=tuple(options.qps),
        turns=tuple(options.turns),
        arrivals_s=options.arrivals_s,
        timeout_s=options.timeout_s,
    )
    if not (min(grid.qps) > 0 and min(grid.turns) > 1 and grid.arrivals_s > 0 < grid.timeout_s):
        raise ConfigError("qps, arrivals-s and timeout-s must be above 0, turns at least 2")
    model = tiny_model.resolve(options.model)
    done = measured(grid, options.out)
    chosen = [side for side in SIDES if side.name in options.policies]
    left = [key for key in order(grid, options.seeds, chosen) if key not in done]
    print(f"{len(left)} runs to measure, {len(done)} in {options.out}", file=sys.stderr, flush=True)
    if left:
        with appending(options.out) as write, launching(options.logs) as launch:
            running = start(launch, model, chosen, _FLAGS)
            uvloop.run(_measure_all(running, grid, left, Path(model).name, write))
    rows = [row for _, row in read_rows(options.out)]
    of_grid = [row for row in rows if row["grid"] == grid.digest]
    cells = summarize(of_grid)
    print(as_text(cells))
    print(json.dumps({"part": "policy-grid", "runs": len(of_grid), "cells": len(cells)}))
    return 0


def measured(grid: Grid, out: Path) -> set[Key]:
    """Read which runs of a grid a file holds.

    Raises:
        ConfigError: the file holds something else.
    """
    if not out.exists():
        return set()
    found: set[Key] = set()
    for number, row in read_rows(out):
        try:
            if row["grid"] == grid.digest:
                found.add((row["side"], Point(row["qps"], row["turns"]), row["seed"]))
        except KeyError as error:
            raise ConfigError(f"{out}:{number}: no row of policy-grid: no {error}") from error
    return found


def order(grid: Grid, seeds: Sequence[int], sides: Sequence[Side] = SIDES) -> Iterator[Key]:
    """Yield all runs: seeds outermost, at each point all sides, each in its turn the first."""
    for seed in seeds:
        for number, point in enumerate(grid.points()):
            first = (number + seed) % len(sides)
            for side in (*sides[first:], *sides[:first]):
                yield side.name, point, seed


async def _measure_all(
    running: RunningSides, grid: Grid, left: Sequence[Key], model: str, write: Write
) -> None:
    sides = {side.name: side for side in running.routers}
    async with aiohttp.ClientSession() as http:
        vocabulary = await running.vocabulary(http)

        async def one(side: Side, point: Point, seed: int, content: str) -> dict[str, Any]:
            conversations = grid.plan(point, seed)
            samples, summary = await measure(
                http,
                running,
                side,
                conversations,
                content=content,
                vocabulary=vocabulary,
                timeout_s=grid.timeout_s,
            )
            row: dict[str, Any] = {"part": "policy-grid", "grid": grid.digest, "side": side.name}
            row |= {"shape": side.shape, "qps": point.qps, "turns": point.turns, "model": model}
            row |= {"sizes": [grid.first, grid.new, grid.reply], "think_s": grid.think_s}
            row |= {"arrivals_s": grid.arrivals_s, "timeout_s": grid.timeout_s}
            return row | asdict(summary) | {"samples": columns(samples)} | provenance(seed)

        for side in running.routers:  # kernels warm up, connections open: not measured
            await one(side, Point(grid.fixed_qps, grid.fixed_turns), -1, "warm")
        begun_s = time.monotonic()
        for number, (name, point, seed) in enumerate(left, 1):
            content = f"{point.qps}/{point.turns}/{seed}"
            row = await one(sides[name], point, seed, content)
            write(row)
            left_s = (time.monotonic() - begun_s) / number * (len(left) - number)
            progress = f"{row['ok']} of {row['planned']} turns, {left_s / 60:.0f} min left"
            print(
                f"  {number}/{len(left)} {name} {content}: {progress}", file=sys.stderr, flush=True
            )
