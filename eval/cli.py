"""``ppd-eval``: demo, serve and benchmarks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppd.errors import PpdError
from ppd.table_policy import Correction

from . import (
    bench_decision,
    bench_hash,
    check_load,
    clients,
    demo,
    load,
    replay_decisions,
    scenarios,
    serve,
)
from .compare import command as compare
from .engine import bench as bench_engine
from .engine import interference, plugin_cost, soak
from .faults import command as fault_table
from .objective import add_targets, add_weights, objective_of
from .policies import grid as policy_grid
from .policies import weights
from .pool import commands as pool_commands
from .rag import commands as rag_commands
from .report import command as report
from .routers import bench as bench_router
from .simulation import command as simulate
from .sweep import drive
from .sweep.config import load_config
from .table import build, trial
from .table import command as table
from .unrest import command as load_router


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ppd-eval", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("--model", help="any SGLang model; default: a small random one")
    cluster.add_argument("--logs", type=Path, default=Path(".run"), help="folder for logs")
    one = commands.add_parser("demo", parents=[cluster], help="five turns, compared")
    one.add_argument("--max-tokens", type=int, default=32, help="of each reply")
    one.add_argument("--record", type=Path, help="append the result to this JSONL file")
    two = commands.add_parser("serve", parents=[cluster], help="leave a cluster up")
    two.add_argument("--policy", default="ppd", help="as of ppd-router")
    two.add_argument("--port", type=int, default=0, help="of the router; 0: any free one")
    three = commands.add_parser("bench-hash", help="cost of recognising a conversation")
    three.add_argument("--history-kb", type=int, default=400)
    three.add_argument("--rounds", type=int, default=500)
    three.add_argument("--seed", type=int, default=0)

    four = commands.add_parser("bench-decision", help="cost of one decision")
    four.add_argument("--table", type=Path, required=True)
    four.add_argument("--sessions", type=int, default=1_000_000)
    four.add_argument("--rounds", type=int, default=5000)
    four.add_argument("--seed", type=int, default=0)
    five = commands.add_parser("sweep", parents=[cluster], help="measure both routes in a grid")
    five.add_argument("config", type=Path, help="a TOML file, see eval/sweep/cpu.toml")
    five.add_argument("--out", type=Path, required=True, help="JSONL of raw rows; is continued")
    five.add_argument("--table", type=Path, help="build it, and let a router try it")
    table.add_to(commands)
    compare.add_to(commands)
    nine = commands.add_parser(
        "weights", parents=[cluster], help="share of local turns as the weights move"
    )
    nine.add_argument("config", type=Path, help="of a sweep: the mix is drawn from its cells")
    nine.add_argument("--table", type=Path, help="default: the shipped one of the model")
    nine.add_argument("--conversations", type=int, default=40)
    nine.add_argument("--qps", type=float, default=3.0, help="turns a second")
    nine.add_argument("--seed", type=int, default=0)
    nine.add_argument("--out", type=Path, required=True, help="JSONL; is continued")
    eight = commands.add_parser(
        "replay-decisions", help="a decision log under another table, weights or policy"
    )
    eight.add_argument("log", type=Path)
    eight.add_argument("--table", type=Path)
    eight.add_argument("--policy", help="in place of the log's")
    eight.add_argument(
        "--corrections", nargs="*", choices=[*Correction], help="in place of the log's"
    )
    eight.add_argument("--show", type=int, default=20, help="changed decisions to print")
    add_weights(eight)
    add_targets(eight)

    ten = commands.add_parser(
        "bench-engine", parents=[cluster], help="full transfer, delta transfer and local append"
    )
    ten.add_argument("--rounds", type=int, default=7, help="of every cell")
    ten.add_argument("--tpot-target-ms", type=float, help="of the bounded worker")
    ten.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the loaded part")
    ten.add_argument("--conversations", type=int, default=24, help="of each loaded run")
    ten.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    eleven = commands.add_parser(
        "interference", parents=[cluster], help="decode TPOT beside full and append-prefills"
    )
    eleven.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192])
    eleven.add_argument("--rounds", type=int, default=5)
    eleven.add_argument("--out", type=Path, required=True, help="JSONL of raw rows")
    eleven.add_argument("--plot", type=Path, help="PNG")
    cost = commands.add_parser(
        "plugin-cost", parents=[cluster], help="decoding with and without the plugin"
    )
    cost.add_argument("--rounds", type=int, default=8)
    cost.add_argument("--decodes", type=int, default=6, help="requests at once")
    cost.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    twelve = commands.add_parser(
        "soak", parents=[cluster], help="random turns, aborts and retractions; looks for leaks"
    )
    twelve.add_argument("--minutes", type=float, default=20.0)
    twelve.add_argument("--pauses", action="store_true", help="pause the decode worker, too")
    twelve.add_argument("--seed", type=int, default=0)
    twelve.add_argument("--out", type=Path, help="append the result to this JSONL file")

    bench_router.add_to(commands)
    fourteen = commands.add_parser(
        "clients", parents=[cluster], help="load clients that others wrote, on real workers"
    )
    fourteen.add_argument(
        "--aiperf",
        type=Path,
        default=Path(".run/aiperf"),
        help="the environment that AIPerf is installed in, on the first run",
    )
    fourteen.add_argument("--out", type=Path, help="append the result to this JSONL file")
    fifteen = commands.add_parser(
        "fault-table", help="the same faults done to our router and to others"
    )
    fifteen.add_argument(
        "--routers", nargs="+", default=fault_table.NAMES, choices=fault_table.NAMES
    )
    fifteen.add_argument("--rows", nargs="+", type=int, help="numbers of rows; default: all")
    fifteen.add_argument("--rivals", type=Path, default=Path(".run/rivals"))
    fifteen.add_argument("--logs", type=Path, default=Path(".run"), help="folder for logs")
    fifteen.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    sixteen = commands.add_parser(
        "load-router", help="our router under load while its workers die, hang and come back"
    )
    sixteen.add_argument("--requests", type=int, default=200_000)
    sixteen.add_argument("--clients", type=int, default=128)
    sixteen.add_argument("--seed", type=int, default=0)
    sixteen.add_argument("--logs", type=Path, default=Path(".run"), help="folder for logs")
    sixteen.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    load.add_parser(commands)
    report.add_parser(commands)
    for part in (check_load, policy_grid, scenarios):
        part.add_parser(commands, cluster)
    pool_commands.add_to(commands)
    rag_commands.add_parsers(commands, cluster)

    simulate.add_to(commands)

    options = parser.parse_args(argv)
    try:
        status = options.run(options) if "run" in options else _run(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush
        sys.exit(141)
    except PpdError as error:
        sys.exit(f"ppd-eval: {error}")
    sys.exit(status)


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "demo":
            model = options.model or None
            return demo.run(model, options.max_tokens, options.logs, options.record)
        case "serve":
            return serve.run(options.model or None, options.policy, options.port, options.logs)
        case "bench-hash":
            return bench_hash.run(options.history_kb, options.rounds, options.seed)
        case "bench-decision":
            return bench_decision.run(options.table, options.sessions, options.rounds, options.seed)
        case "bench-engine":
            return bench_engine.run(
                options.model or None,
                options.rounds,
                options.tpot_target_ms,
                options.seeds,
                options.conversations,
                options.out,
                options.logs,
            )
        case "clients":
            return clients.run(options.model or None, options.aiperf, options.out, options.logs)
        case "fault-table":
            return fault_table.run(
                options.routers, options.rows, options.rivals, options.out, options.logs
            )
        case "load":
            return load.run_command(options)
        case "load-router":
            return load_router.run(
                options.requests, options.clients, options.seed, options.out, options.logs
            )
        case "bench-pool" | "pool-control" | "pool-queueing" | "pool-soak":
            return pool_commands.run(options)
        case "interference":
            return interference.run(
                options.model or None,
                options.contexts,
                options.rounds,
                options.out,
                options.plot,
                options.logs,
            )
        case "plugin-cost":
            scene = plugin_cost.Scene(rounds=options.rounds, decodes=options.decodes)
            return plugin_cost.run(scene, options.model or None, options.out, options.logs)
        case "simulate":
            return simulate.run(options)
        case "soak":
            return soak.run(
                options.model or None,
                options.minutes,
                options.pauses,
                options.seed,
                options.out,
                options.logs,
            )
        case "sweep":
            config = load_config(options.config)
            model = options.model or None
            if options.table is not None:
                config.require_table()
            drive.sweep(config, model, options.out, options.logs)
            if options.table is not None:
                told = build.build(config, options.out, options.table)
                trial.run(config, model, options.table, told, options.logs)
            return 0
        case "weights":
            config = load_config(options.config)
            grid = options.config.name
            mix = weights.Mix(grid, options.conversations, options.qps, options.seed)
            model = options.model or None
            return weights.run(config, model, options.table, mix, options.out, options.logs)
        case "compare":
            return compare.run(options)
        case "table":
            return table.run(options)
        case _:
            corrections = options.corrections
            changes = replay_decisions.Changes(
                table=options.table,
                policy=options.policy,
                corrections=None if corrections is None else frozenset(corrections),
                objective=objective_of(options),
            )
            return replay_decisions.run(options.log, changes, options.show)


if __name__ == "__main__":
    main()
