"""``ppd-eval simulate cluster`` and ``plan``: their options and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import msgspec

from ppd.errors import ConfigError, TableError
from ppd.score import Targets, Weights
from ppd.table import Table

from ..options import Commands, add_out
from ..profiles.profile import load_profile
from ..provenance import provenance
from ..raw_rows import append_whole
from .cache import HostMemory
from .cost_model import Costs, paper_model
from .outages import Outage
from .profile_costs import ProfileCosts
from .study import Routing, StudyRow, Traffic, plan, study, weigh
from .traffic import load
from .workers import PlacementRule, Shape


def add_to(commands: Commands) -> None:
    """Declare ``simulate cluster`` and ``simulate plan``."""
    given = argparse.ArgumentParser(add_help=False)
    given.add_argument(
        "--workloads", type=Path, help="JSON, docs/SIMULATOR.md; or paper: its 18; all in one mix"
    )
    given.add_argument("--names", nargs="+", help="only these workloads")
    given.add_argument("--qps", type=float, default=1.0, help="conversations a second, in all")
    given.add_argument("--duration-s", type=float, default=120.0, help="duration of arrivals")
    given.add_argument("--trace", type=Path, help="JSONL, in place of workloads")
    given.add_argument(
        "--copies", type=int, default=1, help="copies of each conversation of the trace"
    )
    given.add_argument("--profile", help="of 'profile list'; default: the paper's machine")
    given.add_argument("--link-gbps", type=float, default=100.0, help="with --profile")
    given.add_argument("--seed", type=int, default=0)
    add_out(given)
    cluster = commands.add_parser(
        "cluster",
        parents=[given],
        help="any cluster under any traffic",
        description=(
            "Simulate clusters of any shape under any traffic. The last line for each is "
            "one JSON object."
        ),
    )
    cluster.add_argument("--shapes", nargs="+", required=True, help="shapes of clusters, as 1P_3pD")
    cluster.add_argument("--policies", nargs="+", default=["full"], help="policies of the router")
    cluster.add_argument("--table", type=Path, help="table of policy ppd")
    cluster.add_argument("--w-ttft", type=float, default=1.0, help="its weight of TTFT")
    cluster.add_argument("--w-tpot", type=float, default=1.0, help="its weight of TPOT")
    cluster.add_argument(
        "--placement",
        nargs="+",
        choices=[*PlacementRule],
        default=[PlacementRule.CHANCE],
        help="placement of new conversations",
    )
    cluster.add_argument("--think-s", nargs="+", type=float, help="mean pauses between turns")
    cluster.add_argument(
        "--outages",
        nargs="+",
        default=[],
        metavar="WORKER@AT_S+FOR_S",
        help="a worker dies and comes back: a0@30+10; p0, d0, r0 are others",
    )
    cluster.add_argument(
        "--resume-streams", type=int, default=0, help="maximum number of resumptions of a stream"
    )
    cluster.add_argument(
        "--host-gb", type=float, default=0.0, help="with --profile: memory of a host for KV"
    )
    cluster.add_argument(
        "--host-gbps", type=float, default=400.0, help="between host and device, of a worker"
    )
    cluster.add_argument("--scaled", action="store_true", help="--qps is for each worker")
    cluster.set_defaults(run=run_cluster)
    wanted = commands.add_parser(
        "plan",
        parents=[given],
        help="the cheapest cluster that will do",
        description=(
            "Find the fewest workers that meet the targets, their roles, and the weights "
            "for the router. The last line is one JSON object."
        ),
    )
    wanted.add_argument("--think-s", type=float, help="mean pause between turns")
    wanted.add_argument("--slo-ttft-ms", type=float)
    wanted.add_argument("--slo-tpot-ms", type=float)
    wanted.add_argument(
        "--share", type=float, default=0.95, help="share of turns that must meet the targets"
    )
    wanted.add_argument("--max-workers", type=int, default=8)
    wanted.set_defaults(run=run_plan)


def run_cluster(options: argparse.Namespace) -> int:
    """One JSON line for each shape, policy, placement and pause.

    Raises:
        ConfigError: an option makes no sense.
    """
    weights = Weights(options.w_ttft, options.w_tpot)
    if problem := weights.problem():
        raise ConfigError(problem)
    if options.resume_streams < 0:
        raise ConfigError(f"--resume-streams must be at least 0, got {options.resume_streams}")
    table = None if options.table is None else _table(options.table)
    outages = tuple(Outage.parse(text) for text in options.outages)
    rows = []
    costs, about = costs_of(options)
    host = _host(options)
    if host is not None:
        about |= {"host_gb": options.host_gb, "host_gbps": options.host_gbps}
    for shape, policy, placement, think_s in product(
        options.shapes, options.policies, options.placement, options.think_s or [None]
    ):
        routing = Routing(table, weights, PlacementRule(placement), outages, options.resume_streams)
        traffic = replace(_traffic(options), think_s=think_s)
        if options.scaled:
            traffic = replace(traffic, qps=traffic.qps * Shape.parse(shape).workers)
        row = study(costs, shape, policy, traffic, options.seed, routing=routing, host=host)
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    if outages:
        about |= {"outages": options.outages, "resume_streams": options.resume_streams}
    _write(options.out, rows, options.seed, about)
    return 0


def _host(options: argparse.Namespace) -> HostMemory | None:
    if not options.host_gb:
        return None
    if options.profile is None or not (options.host_gb > 0 and options.host_gbps > 0):
        raise ConfigError("--host-gb takes a --profile; it and --host-gbps must be above 0")
    profile = load_profile(options.profile)
    tokens = int(1e9 * options.host_gb / profile.kv_bytes_per_token)
    return HostMemory(tokens, profile.transfer_ms(1, options.host_gbps))


def _table(path: Path) -> Table:
    try:
        return Table.parse(path.read_bytes())
    except (OSError, TableError) as error:
        raise ConfigError(f"{path}: {error}") from error


def run_plan(options: argparse.Namespace) -> int:
    """A line for each cluster that was tried, and one JSON line.

    Raises:
        ConfigError: an option makes no sense.
    """
    targets = Targets(options.slo_ttft_ms, options.slo_tpot_ms)
    if problem := targets.problem():
        raise ConfigError(problem)
    if not (0 < options.share <= 1 and options.max_workers >= 1):
        raise ConfigError("--share must be above 0, at most 1; --max-workers at least 1")
    traffic = replace(_traffic(options), think_s=options.think_s)
    costs, about = costs_of(options)
    tried, best = plan(costs, traffic, targets, options.share, options.max_workers, options.seed)
    for row in tried:
        print(
            f"{row.shape:12} {row.policy:8} {row.ok_share or 0:7.1%}  TTFT p99 "
            f"{row.t2_ttft_p99_ms:8.0f} ms  TPOT p99 {row.tpot_p99_ms:6.1f} ms  "
            f"{row.gpu_s_per_mtoken:8.0f} GPU s a million tokens"
        )
    summary: dict[str, object] = {
        "tried": len(tried),
        "best": None if best is None else asdict(best),
        **provenance(options.seed),
    }
    if best is not None and (weighing := weigh(costs, best, traffic, options.seed)) is not None:
        summary |= {
            "w_ttft": weighing.weights.ttft,
            "w_tpot": round(weighing.weights.tpot, 3),
            "local_up_to_w_tpot": weighing.local_up_to,
        }
    asked = {"targets": msgspec.to_builtins(targets), "share": options.share}
    asked |= {"qps": options.qps, "traffic": (options.workloads or options.trace).name}
    more = [{"row": "plan", **asked, **about, **summary}]
    _write(options.out, tried, options.seed, about, more)
    print(json.dumps(summary))
    return 0


def costs_of(options: argparse.Namespace) -> tuple[Costs, dict[str, object]]:
    """Return the costs of the machine that is asked for, and the fields of rows that name it."""
    if options.profile is None:
        return paper_model(), {}
    if not options.link_gbps > 0:
        raise ConfigError(f"--link-gbps must be above 0, got {options.link_gbps:g}")
    profile = load_profile(options.profile)
    about = {**profile.provenance(), "link_gbps": options.link_gbps}
    return ProfileCosts(profile, options.link_gbps), about


def _traffic(options: argparse.Namespace) -> Traffic:
    if (options.workloads is None) is (options.trace is None):
        raise ConfigError("give --workloads or --trace")
    if options.trace is not None:
        if options.copies < 1:
            raise ConfigError("--copies must be at least 1")
        return Traffic(trace=options.trace, copies=options.copies)
    if not (options.qps > 0 and options.duration_s > 0):
        raise ConfigError("--qps and --duration-s must be above 0")
    workloads = load(options.workloads)
    if options.names:
        workloads = tuple(workload for workload in workloads if workload.name in options.names)
    if not workloads:
        raise ConfigError(f"{options.workloads} holds none of these workloads")
    return Traffic(workloads, options.qps, options.duration_s)


def _write(
    out: Path | None,
    rows: list[StudyRow],
    seed: int,
    about: Mapping[str, object] | None = None,
    more: Sequence[dict[str, object]] = (),
) -> None:
    if out is not None:
        made = [
            {"row": "study", **asdict(row), **(about or {}), **provenance(seed)} for row in rows
        ]
        append_whole(out, [*made, *more])
