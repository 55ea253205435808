"""``ppd-eval simulate``: what a cluster would do, without one."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from ppd.errors import ConfigError

from ..options import Commands, add_out
from ..profiles.files import write_file
from ..provenance import provenance
from ..sweep.config import load_config
from . import (
    cpu_check,
    first_turns,
    paper_figures,
    placement_study,
    route_map,
    search_placement,
    study_command,
    sweeping,
)
from .cost_model import VLLM_H100, CostModel, paper_model
from .fitted_profile import fitted_profile
from .paper_claims import Claim, claims
from .paper_grid import CONFIGURATIONS, Harness, Point, PointRow, measure, points
from .paper_interference import Curve, curves
from .paper_points import CALIBRATION, PREDICTED, Measured, calibrate, simulated
from .traffic import Workload, load


def add_to(commands: Commands) -> None:
    """Declare ``simulate paper``, ``cpu``, ``cluster``, ``plan`` and the others."""
    given = argparse.ArgumentParser(add_help=False)
    given.add_argument(
        "--workloads", type=Path, default=Path("paper"), help="JSON, docs/SIMULATOR.md"
    )
    paper = commands.add_parser(
        "paper",
        parents=[given],
        help="the PPD paper's grid, and every number that it states",
        description=(
            "Simulate the PPD paper's grid, and compare the points that it measured and "
            "every number that it states. The last line is one JSON object."
        ),
    )
    paper.add_argument("--seed", type=int, default=0)
    paper.add_argument(
        "--duration-s", type=float, default=10.0, help="duration of arrivals, at each point"
    )
    paper.add_argument(
        "--connections", type=int, default=50, help="connections of the clients; 0: no bound"
    )
    paper.add_argument("--replies-found", action="store_true", help="caches hold replies, too")
    paper.add_argument(
        "--same-arrivals", action="store_true", help="the same arrivals in every configuration"
    )
    paper.add_argument("--processes", type=int, help="default: one a core")
    add_out(paper)
    paper.set_defaults(run=run_paper)
    cpu = commands.add_parser(
        "cpu",
        help="against a real cluster, by what a sweep measured",
        description=(
            "Compare the simulator with a sweep of a real cluster. The last line is one "
            "JSON object."
        ),
    )
    cpu.add_argument("config", type=Path, help="configuration of the sweep")
    cpu.add_argument("raw", type=Path, help="raw rows of the sweep")
    cpu.add_argument("--paced", action="store_true", help="its decode workers bounded chunks")
    add_out(cpu)
    cpu.set_defaults(run=run_cpu_check)
    study_command.add_to(commands)
    sweeping.add_to(commands)
    route_map.add_to(commands)
    placement_study.add_to(commands)
    search_placement.add_to(commands)
    first_turns.add_to(commands)
    paper_figures.add_to(commands)
    fitting = commands.add_parser(
        "calibrate",
        parents=[given],
        help="fit the cost model to measured points",
        description="Fit the cost model to measured points. The last line is one JSON object.",
    )
    fitting.add_argument(
        "--profile",
        type=Path,
        help="fit nothing: write the cost model in use as a profile, a .json",
    )
    fitting.set_defaults(run=run_calibrate)


def run_cpu_check(options: argparse.Namespace) -> int:
    """Compare the simulator with a sweep of a real cluster."""
    config = load_config(options.config)
    return cpu_check.run(config, options.raw, paced=options.paced, out=options.out)


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit the cost model to the measured points, or write it as a profile; print one JSON line.

    Raises:
        ConfigError: the workloads cannot be read, or the profile cannot be written.
    """
    if options.profile is not None:
        file = fitted_profile(paper_model())
        write_file(options.profile, file)
        print(json.dumps({"profile": file.name, "max_error": file.interpolation.max_error}))
        return 0
    serving = calibrate(VLLM_H100, load(options.workloads))
    print(json.dumps({"seed": 0, **asdict(serving)}))
    return 0


def run_paper(options: argparse.Namespace) -> int:
    """Simulate the paper's grid, and print the tables and one JSON line.

    Raises:
        ConfigError: the workloads cannot be read, or an option is wrong.
    """
    workloads = load(options.workloads)
    processes = os.cpu_count() or 1 if options.processes is None else options.processes
    if options.duration_s <= 0 or options.connections < 0 or processes < 1:
        raise ConfigError("--duration-s and --processes must be above 0, --connections at least 0")
    harness = replace(
        Harness(),
        duration_s=options.duration_s,
        connections=options.connections,
        replies_lost=not options.replies_found,
        same_arrivals=options.same_arrivals,
    )
    return paper(workloads, harness, options.seed, processes, options.out)


@dataclass(frozen=True, slots=True)
class Checked:
    """A measured point and its simulation."""

    point: Measured
    simulated: float
    calibration: bool

    @property
    def off(self) -> float:
        """The relative error of the simulation."""
        return self.simulated / self.point.value - 1


def paper(
    workloads: Sequence[Workload], harness: Harness, seed: int, processes: int, out: Path | None
) -> int:
    """Print the tables and one JSON line."""
    costs = paper_model()
    started_s = time.monotonic()
    grid = list(points(workloads, CONFIGURATIONS, seed))
    rows = measure_all(grid, harness, costs, processes)
    wall_s = time.monotonic() - started_s
    checked = list(_check(workloads, harness, costs))
    stated, drawn = claims(rows, costs), list(curves(costs))
    _print_points(checked)
    _print_claims(stated)
    summary = {
        "points": len(rows),
        "turns": sum(row.turns for row in rows),
        "wall_s": round(wall_s, 2),
        "processes": processes,
        "harness": asdict(harness),
        "claims": len(stated),
        **provenance(seed),
    }
    if out is not None:
        _write(out, rows, checked, stated, drawn, summary)
    print(json.dumps(summary))
    return 0


def measure_all(
    grid: list[Point], harness: Harness, costs: CostModel, processes: int
) -> list[PointRow]:
    """Simulate all points, in so many processes."""
    work = partial(measure, harness=harness, costs=costs)
    if processes == 1:
        return [work(point) for point in grid]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(work, grid, chunksize=20)


def _check(workloads: Sequence[Workload], harness: Harness, costs: CostModel) -> Iterator[Checked]:
    names = {workload.name for workload in workloads}
    for some, calibration in ((CALIBRATION, True), (PREDICTED, False)):
        known = [point for point in some if point.workload in names]
        values = simulated(known, workloads, costs, harness)
        for point, value in zip(known, values, strict=True):
            yield Checked(point, value, calibration)


def _print_points(checked: Iterable[Checked]) -> None:
    print("| measured point | | measured | simulated | off | |\n|---|---|---|---|---|---|")
    for check in checked:
        point = check.point
        print(
            f"| {point.configuration} {point.workload} QPS {point.qps:g} | {point.metric} "
            f"| {point.value:g} | {check.simulated:.1f} | {check.off:+.0%} "
            f"| {'calibration' if check.calibration else ''} |"
        )


def _print_claims(stated: Iterable[Claim]) -> None:
    print("\n| claim | | paper | simulated | difference |\n|---|---|---|---|---|")
    for claim in stated:
        if claim.simulated is None or claim.difference is None:
            values = "- | -"
        else:
            values = f"{claim.simulated:.1f} | {claim.difference:+.1f}"
        print(f"| {claim.group} | {claim.name} | {claim.paper:g} | {values} |")


def _write(
    out: Path,
    rows: list[PointRow],
    checked: list[Checked],
    stated: list[Claim],
    drawn: list[Curve],
    summary: dict[str, object],
) -> None:
    lines = [
        *({"row": "point", **asdict(row)} for row in rows),
        *(
            {
                "row": "measured",
                **asdict(check.point),
                "simulated": check.simulated,
                "calibration": check.calibration,
            }
            for check in checked
        ),
        *({"row": "claim", **asdict(claim), "difference": claim.difference} for claim in stated),
        *({"row": "curve", **asdict(point)} for point in drawn),
        {"row": "run", **summary},
    ]
    try:
        with out.open("ab") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"{out}: {error}") from error
    print(f"{len(lines)} rows appended to {out}", file=sys.stderr)
