"""``ppd-eval simulate sweep``: a decision table of a machine that only a profile describes.

The configuration is that of ``ppd-eval sweep``, and so are runs, rows and table. Only the workers
are simulated. A table's provenance has the profile, the calibration and the link as its hardware.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from ppd import __version__
from ppd.decision import Route
from ppd.policies import static_policy

from ..options import Commands, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from ..samples import Sample
from ..sweep.config import Place, Run, SweepConfig, load_config, plan
from ..sweep.rows import RunResult
from ..table.build import lost, write_table
from .machine import CHUNKING, Machine
from .planned import simulated
from .profile_costs import ProfileCosts
from .rows import TurnRow
from .simulator import Simulation
from .traffic import Clients, Conversation
from .workers import Shape

_APART_S = 1e5  # between rounds, and between conversations that are held one after the other
_WARM_ROUNDS = 2  # the pacer of a worker that serves is warm


def add_to(commands: Commands) -> None:
    """Declare ``simulate sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="a decision table of a machine that a profile describes",
        description=(
            "Simulate a sweep, and write the decision table of a machine that only a profile "
            "describes. The last line is one JSON object."
        ),
    )
    parser.add_argument("config", type=Path, help="configuration of the sweep")
    parser.add_argument("--profile", required=True, help="of 'profile list'")
    parser.add_argument("--calibration", default="device", help="of the profile")
    parser.add_argument("--link-gbps", type=float, default=100.0)
    parser.add_argument("--slower", type=float, default=1.0, help="a further factor on every step")
    parser.add_argument("--table", type=Path, required=True, help="the table to write")
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate a sweep, and write its table.

    Raises:
        ConfigError: the configuration or the profile is wrong, or a file cannot be written.
    """
    config = load_config(options.config)
    machine = Machine(options.profile, options.link_gbps, options.calibration, options.slower)
    results = list(sweep(config, machine))
    if options.out is not None:
        append_whole(options.out, list(rows_of(config, results)))
    print(json.dumps(write_table(config, results, options.config, options.table)))
    return 0


def sweep(config: SweepConfig, machine: Machine) -> Iterator[RunResult]:
    """Simulate every run of a sweep.

    With ``adaptive`` a place is left out if the cluster cannot serve it on one of the routes. The
    table fills its cell from those around.

    Raises:
        ConfigError: the machine has no such profile, or the sweep makes no table.
        OutsideProfileError: a step lies beyond twice the range of the profile.
    """
    config.require_table()
    costs = machine.costs()
    for seed in config.seeds:
        for workload in config.workloads():
            for qps in (None, *range(len(config.axes.qps))):
                runs = [Run(Place(workload, qps), policy, seed) for policy in config.policies]
                results = [_result(run, _simulate(config, run, costs), machine) for run in runs]
                if config.adaptive is None or not any(lost(result) for result in results):
                    yield from results


def rows_of(config: SweepConfig, results: list[RunResult]) -> Iterator[dict[str, object]]:
    """Yield the rows of a raw file, as a sweep of a real cluster writes them."""
    asked = msgspec.to_builtins(config)
    yield {"row": "sweep", "config": config.digest, "asked": asked, **provenance(0)}
    for result in results:
        yield from ({"row": "turn", **turn} for turn in result.turns)
        yield {"row": "run", "config": config.digest, **result.summary}


def _simulate(config: SweepConfig, run: Run, costs: ProfileCosts) -> list[TurnRow]:
    """Simulate the warm rounds, then the one that counts; its times begin at 0."""
    prefill, decode, replica = config.workers
    planned = simulated(plan(config, run.place, run.seed))
    quiet = run.place.qps is None
    conversations: list[Conversation] = []
    start_s = 0.0
    for _ in range(_WARM_ROUNDS + 1):
        begun_s = start_s
        for one in planned:
            conversations.append(
                Conversation(len(conversations), start_s + one.at_s, one.turns, one.think_s)
            )
            if quiet:
                start_s += _APART_S
        start_s += _APART_S
    simulation = Simulation(
        costs,
        Shape(prefill=prefill, appending=decode, replica=replica),
        static_policy(run.policy),
        Clients(),
        run.seed,
        delta=True,
        chunking=CHUNKING,
    )
    counted = len(planned) * _WARM_ROUNDS
    rows = simulation.run(conversations).rows
    return [replace(row, at_s=row.at_s - begun_s) for row in rows if row.session >= counted]


def _result(run: Run, rows: list[TurnRow], machine: Machine) -> RunResult:
    """The result of a run, with the fields that a sweep of a real cluster writes."""
    samples = [
        Sample(
            conversation=row.session,
            turn=row.turn,
            sent_at_s=row.at_s,
            late_ms=0.0,
            context_tokens=0,
            new_tokens=row.prompt_tokens - row.cached_tokens,
            output_tokens=row.output_tokens,
            cached_tokens=row.cached_tokens,
            route=row.route,
            reason=row.reason,
            ttft_ms=row.ttft_ms,
            tpot_ms=row.tpot_ms,
            error="failed" if row.failed else "",
            e2e_ms=row.e2e_ms,
        )
        for row in rows
    ]
    later = [row for row in rows if row.turn > 1]
    file = machine.load().file
    summary: dict[str, object] = {
        "workload": list(run.place.workload),
        "qps": run.place.qps,
        "policy": run.policy,
        "turns": len(rows),
        "failed": sum(row.failed for row in rows),
        "strayed": sum(
            not row.failed and row.route not in (run.route, Route.REPLICA) for row in later
        ),
        "wall_s": max(row.at_s + row.e2e_ms / 1e3 for row in rows),
        "model": file.model,
        "engine": "the simulator",
        "plugin": __version__,
        **machine.provenance(),
        **provenance(run.seed),
        "hardware": f"simulated {machine.name}",
    }
    return RunResult(run, summary, [asdict(sample) for sample in samples])
