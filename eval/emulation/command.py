"""``ppd-eval emulate``: the real scheduler, plugin and router on a modelled device."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppd.choice import PlacementRule
from ppd.contract import Role
from ppd.errors import ConfigError

from ..cluster import Process, launching, wait_all
from ..options import Commands, add_logs, add_out
from ..profiles.files import known
from ..profiles.profile import Profile, load_profile
from ..provenance import provenance
from ..raw_rows import append_whole, appending, end_last_line, read_rows
from ..summary import Slo
from .check import CONTEXTS, DECODES, LINKS_GBPS, Plan, measure
from .check_rows import largest_error, summarize
from .clusters import SHAPES, Run, ranks_of, roles_of, run_once, slow_motion_for, start_cluster
from .compare import compare
from .drafts import Drafts
from .rest import measure_rest
from .workers import emulated

MAX_ERROR = 0.10
_DEFAULT_PROFILE = "llama-3.1-8b-h100-tp1"
_READY_S = 600.0  # a start on a busy machine
_FIXED_CHUNK = "PPD_APPEND_CHUNK=512"  # so that a prediction needs no pacer


def add_to(commands: Commands) -> None:
    """Declare ``emulate check``, ``emulate cluster`` and ``emulate compare``."""
    check = commands.add_parser(
        "check",
        parents=[profile_options()],
        help="single turns against what the profile predicts",
        description=(
            "Send single turns to emulated workers and compare them with predictions that are "
            "written before the run. Rows in --out are continued. The last line is one JSON object."
        ),
    )
    check.add_argument("--slow-motion", type=float, default=40.0, help="the least; default: 40")
    check.add_argument("--repeats", type=int, default=3)
    check.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    check.add_argument("--decodes", type=int, nargs="+", default=list(DECODES))
    check.add_argument("--links-gbps", type=float, nargs="+", default=list(LINKS_GBPS))
    check.set_defaults(run=run_check)
    cluster = commands.add_parser(
        "cluster",
        parents=[profile_options()],
        help="conversations on a cluster, through the router",
        description=(
            "Hold conversations on an emulated cluster behind the ordinary router. Runs that --out "
            "has already are skipped. The last line is one JSON object."
        ),
    )
    cluster.add_argument("shape", help=f"as {', '.join(SHAPES)}")
    cluster.add_argument("--workload", default="paper:large_big_paste", help="docs/WORKLOADS.md")
    cluster.add_argument("--conversations", type=int, default=40, help="of each run; default: 40")
    cluster.add_argument("--qps", type=float, nargs="+", default=[1.0], help="conversations/s")
    cluster.add_argument("--seeds", type=int, nargs="+", default=[0])
    cluster.add_argument("--policies", nargs="+", default=["full", "pd"], help="of the router")
    cluster.add_argument(
        "--placements",
        nargs="+",
        choices=[*PlacementRule],
        default=[PlacementRule.LOAD],
        help="the router's option placement; default: load",
    )
    cluster.add_argument("--table", type=Path, help="decision table, for the policy ppd")
    cluster.add_argument("--link-gbps", type=float, default=100.0)
    cluster.add_argument(
        "--slow-motion", type=float, help="default: by the load, so that this machine keeps up"
    )
    cluster.add_argument("--slo-ttft-ms", type=float)
    cluster.add_argument("--slo-tpot-ms", type=float)
    cluster.add_argument(
        "--drafts",
        default="",
        metavar="RATE,RATE,...@SHARE",
        help="speculative decoding: accept rate of each draft token, and the time of a draft's "
        "forward as a share of the target's; 0.8,0.7,0.6@0.05",
    )
    cluster.add_argument("--tpot-target-ms", type=float, help="of the decode workers' pacer")
    cluster.set_defaults(run=run_cluster)
    against = commands.add_parser(
        "compare",
        help="the simulator on the inputs of emulated runs",
        description=(
            "Simulate the runs of a file of 'emulate cluster' with the same profile, and compare "
            "the medians. The last line is one JSON object."
        ),
    )
    against.add_argument("runs", type=Path, help="rows of 'emulate cluster'")
    add_out(against)
    against.set_defaults(run=run_compare)


def profile_options() -> argparse.ArgumentParser:
    """Return a parent parser with the options of all emulations."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--profile",
        default=_DEFAULT_PROFILE,
        help=f"one of {', '.join(known())}, or a .json; default: {_DEFAULT_PROFILE}",
    )
    parser.add_argument("--calibration", default="device", help="of the profile; default: device")
    add_out(parser)
    add_logs(parser)
    return parser


def run_check(options: argparse.Namespace) -> int:
    """Measure the cells, and print one JSON line.

    Returns:
        0 if each cell's median is within a tenth of its prediction.

    Raises:
        ConfigError: an option is wrong.
        PpdError: a worker failed, the machine was too slow, or KV bytes or routes are not those
            that were predicted.
    """
    profile = load_profile(options.profile, options.calibration)
    plan = Plan(
        options.slow_motion,
        options.repeats,
        tuple(options.contexts),
        tuple(options.links_gbps),
        tuple(options.decodes),
    )
    if plan.repeats < 1 or min(plan.contexts) < 64 or min(plan.decodes) < 0:
        raise ConfigError("--repeats and --decodes must be positive, --contexts at least 64")
    rows = kept_rows(options.out, profile)
    done = {(row["cell"], row["repeat"]) for row in rows if row["row"] == "turn"}
    has_rest = any(row["row"] == "rest" for row in rows)
    if not has_rest or not plan.is_done(done):
        _measure_check(options, profile, plan, rows, done, has_rest=has_rest)
    summary = summarize(rows)
    print_cells(summary["cells"])
    print(json.dumps(summary))
    return 0 if largest_error(summary) <= MAX_ERROR else 1


def _measure_check(
    options: argparse.Namespace,
    profile: Profile,
    plan: Plan,
    rows: list[dict[str, Any]],
    done: set[tuple[str, int]],
    *,
    has_rest: bool,
) -> None:
    """Measure what is missing, and add it to ``rows`` and to the file."""
    with (
        appending(options.out) as write,
        launching(options.logs) as launch,
        emulated(launch, profile, options.profile, options.logs / "emulation") as cluster,
    ):

        def note(row: dict[str, Any]) -> None:
            rows.append(row)
            write(row)

        cluster.start("p0", Role.PREFILL)
        cluster.start("d0", Role.DECODE, _FIXED_CHUNK)
        wait_all(list(cluster.workers.values()), _READY_S)
        origin = {**profile.provenance(), **provenance(0)}
        asyncio.run(measure(cluster, plan, done, note, origin))
        if not has_rest:
            asyncio.run(measure_rest(cluster, note, origin))


def run_cluster(options: argparse.Namespace) -> int:
    """Hold the conversations of all runs, and print one JSON line.

    Raises:
        ConfigError: an option is wrong.
        PpdError: a worker failed, or the machine was too slow for the slow motion.
    """
    profile = load_profile(options.profile, options.calibration)
    runs = _runs(options)
    rows = kept_rows(options.out, profile)
    slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
    drafts = Drafts.parse(options.drafts) if options.drafts else None
    target = []
    if options.tpot_target_ms is not None:
        target = [f"PPD_TPOT_TARGET_MS={options.tpot_target_ms * runs[0].slow_motion:g}"]
    table = [] if options.table is None else ["--table", str(options.table)]
    folder = options.logs / "emulation"
    with (
        launching(options.logs) as launch,
        emulated(
            launch, profile, options.profile, folder, drafts, ranks=ranks_of(options.shape) > 1
        ) as cluster,
    ):
        routers: dict[tuple[str, str], Process] = {}
        for run in runs:
            fields = {"shape": options.shape, **asdict(run)}
            if any(_is_of(row, {"row": "run", **fields}) for row in rows):
                continue
            of_router = run.policy, run.placement
            if of_router not in routers:
                flags = ["--policy", run.policy, *(table if run.policy == "ppd" else [])]
                routers[of_router] = start_cluster(
                    cluster,
                    options.shape,
                    flags,
                    target,
                    run.slow_motion,
                    f'placement = "{run.placement}"',
                )
            origin = {"shape": options.shape, **profile.provenance(), **provenance(run.seed)}
            own = [{**row, **origin} for row in run_once(cluster, routers[of_router], run, slo)]
            rows += own
            if options.out is not None:
                append_whole(options.out, own)
    wanted = [{"row": "run", "shape": options.shape, **asdict(run)} for run in runs]
    print(json.dumps({"runs": [row for row in rows if any(_is_of(row, want) for want in wanted)]}))
    return 0


def run_compare(options: argparse.Namespace) -> int:
    """Simulate the runs of a file, print the errors and one JSON line.

    Raises:
        ConfigError: the file cannot be read, or holds no run.
    """
    rows = [row for _, row in read_rows(options.runs)]
    runs = [row for row in rows if row.get("row") == "run"]
    turns = [row for row in rows if row.get("row") == "turn"]
    if not runs:
        raise ConfigError(f"{options.runs}: has no run of an emulated cluster")
    found = [
        {**compared, **provenance(compared["seed"])}
        for row in runs
        for compared in compare(row, turns)
    ]
    for row in found:
        print(
            f"{row['shape']:5} {row['policy']:8} {row['qps']:g}/s seed {row['seed']} "
            f"{row['metric']:15} emulated {row['emulated']:8.2f}  simulated "
            f"{row['simulated']:8.2f}  {row['error']:+.1%} "
            f"[{row['error_interval'][0]:+.1%}, {row['error_interval'][1]:+.1%}]"
        )
    if not found:
        raise ConfigError(f"{options.runs}: has no turns of its runs")
    if options.out is not None:
        append_whole(options.out, found)
    print(json.dumps({"comparisons": len(found), "max_error": max(abs(r["error"]) for r in found)}))
    return 0


def _runs(options: argparse.Namespace) -> list[Run]:
    workers = len(roles_of(options.shape)) * ranks_of(options.shape)

    def run(policy: str, placement: str, qps: float, seed: int, slow_motion: float) -> Run:
        return Run(
            options.workload,
            policy,
            qps,
            seed,
            options.conversations,
            slow_motion,
            options.link_gbps,
            placement,
            options.drafts,
        )

    policies = ["replica"] if options.shape.endswith("R") else options.policies
    slow_motion = options.slow_motion or max(
        slow_motion_for(workers, run(policies[0], PlacementRule.LOAD, qps, 0, 1.0).plan())
        for qps in options.qps
    )
    return [
        run(policy, placement, qps, seed, slow_motion)
        for seed in options.seeds
        for qps in options.qps
        for policy in policies
        for placement in options.placements
    ]


def _is_of(row: dict[str, Any], fields: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in fields.items())


def kept_rows(out: Path | None, profile: Profile) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same profile and calibration.

    Raises:
        ConfigError: the file cannot be read, or its rows are of another profile.
    """
    if out is None or not out.exists():
        return []
    end_last_line(out)
    rows = [row for _, row in read_rows(out)]
    own = profile.provenance()
    if any({key: row.get(key) for key in own} != own for row in rows):
        raise ConfigError(f"{out}: has rows of another profile or calibration; use another file")
    return rows


def print_cells(cells: Sequence[dict[str, Any]]) -> None:
    """Print a table of cells."""
    print(
        "cell                            predicted   measured   error    k   cached      MB  route"
    )
    for cell in cells:
        error = cell["measured_ms"] / cell["predicted_ms"] - 1
        print(
            f"{cell['name']:30}  {cell['predicted_ms']:8.1f}  {cell['measured_ms']:8.1f}  "
            f"{error:+7.1%}  {cell['k']:4g}  {cell['cached_tokens']:6}  "
            f"{cell['kv_bytes'] / 1e6:7.1f}  {cell['route']}"
        )
