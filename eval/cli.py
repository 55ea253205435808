"""``ppd-eval``: the command line of the demo, the benches and the studies."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppd.errors import PpdError

from . import (
    bench_cores,
    bench_decision,
    bench_hash,
    bench_placement,
    bench_shared,
    check_load,
    demo,
    load,
    replay_decisions,
    scenarios,
    serve,
)
from .chaos import command as soak_router
from .clients import command as clients
from .compare import command as compare
from .compare import observable
from .emulation import command as emulate
from .emulation import sweeping as emulated_sweep
from .engine import bench as bench_engine
from .engine import interference
from .engine import ranks as bench_ranks
from .engine import soak as soak_engine
from .engine import speculation as bench_speculation
from .faults import command as fault_table
from .options import Commands
from .policies import grid as policy_grid
from .policies import weights
from .pool import commands as pool
from .profiles import command as profile
from .rag import commands as rag
from .report import command as report
from .routers import bench as bench_router
from .routers import stages as router_stages
from .simulation import command as simulate
from .sweep import command as sweep
from .table import command as table


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command, and exit with its status.

    A :class:`ppd.errors.PpdError` ends the process with its message on one line.
    """
    options = parser().parse_args(argv)
    try:
        status = options.run(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush
        sys.exit(141)
    except PpdError as error:
        sys.exit(f"ppd-eval: {error}")
    sys.exit(status)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, the function that runs it."""
    top = argparse.ArgumentParser(prog="ppd-eval", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for module in (demo, serve, load, sweep, compare, report):
        module.add_to(commands)

    bench = _group(commands, "bench", "what one part costs, ours and others'")
    bench_hash.add_to(bench)
    _add_bench_decision(bench)
    bench_placement.add_to(bench)
    bench_cores.add_to(bench)
    bench_shared.add_to(bench)
    bench_engine.add_to(bench)
    interference.add_to(bench)
    bench_speculation.add_to(bench)
    bench_ranks.add_to(bench)
    bench_router.add_to(bench)
    router_stages.add_to(bench)
    fault_table.add_to(bench)
    pool.add_bench(bench)
    pool.add_card(bench)

    tables = _group(commands, "table", "decision tables, and what they decide")
    table.add_to(tables)
    weights.add_to(tables)
    replay_decisions.add_to(tables)

    traffic = _group(commands, "traffic", "whole conversations on real workers")
    for module in (policy_grid, scenarios, check_load, clients):
        module.add_to(traffic)

    simulation = _group(commands, "simulate", "a cluster by its cost model, in one process")
    simulate.add_to(simulation)
    observable.add_to(simulation)

    emulation = _group(commands, "emulate", "real workers on a GPU whose time is modelled")
    emulate.add_to(emulation)
    emulated_sweep.add_to(emulation)
    profile.add_to(_group(commands, "profile", "what the steps of a model on a GPU take"))

    soak = _group(commands, "soak", "long runs with faults; nothing may be wrong or missing")
    soak_engine.add_to(soak)
    soak_router.add_to(soak)
    pool.add_soak(soak)

    of_pool = _group(commands, "pool", "studies of the vector-search pool")
    pool.add_queueing(of_pool)
    pool.add_control(of_pool)
    pool.add_bursts(of_pool)
    rag.add_to(_group(commands, "rag", "chats with passages from a pool"))
    return top


def _group(commands: Commands, name: str, description: str) -> Commands:
    group = commands.add_parser(name, help=description, description=description)
    return group.add_subparsers(metavar="COMMAND", required=True)


def _add_bench_decision(commands: Commands) -> None:
    decision = commands.add_parser(
        "decision",
        help="cost of one decision",
        description=(
            "Measure what one decision costs the router, with many known sessions. The last "
            "line is one JSON object."
        ),
    )
    decision.add_argument("--table", type=Path, required=True)
    decision.add_argument("--sessions", type=int, default=1_000_000)
    decision.add_argument("--rounds", type=int, default=5000)
    decision.add_argument("--seed", type=int, default=0)
    decision.set_defaults(
        run=lambda of: bench_decision.run(of.table, of.sessions, of.rounds, of.seed)
    )


if __name__ == "__main__":
    main()
