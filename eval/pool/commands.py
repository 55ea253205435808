"""The pool's commands: what they take. Their work is imported when it is asked for, as numba and
faiss are slow to import and not everybody has them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    bench = commands.add_parser("bench-pool", help="vector search, ours and others'")
    bench.add_argument(
        "--sentences",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="text, or JSONL with messages; what they lack comes from Python docstrings",
    )
    bench.add_argument("--count", type=int, default=50_000, help="sentences")
    bench.add_argument("--shortest", type=int, help="of them, to embed; default: all")
    bench.add_argument("--large", type=int, default=1_000_000, help="synthetic rows; 0: none")
    bench.add_argument("--queries", type=int, default=1000)
    bench.add_argument("--rounds", type=int, default=5)
    bench.add_argument("--burst-s", type=float, default=10.0, help="of each run of bursts")
    bench.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument(
        "--cache", type=Path, default=Path(".run/minilm"), help="of the model and embeddings"
    )
    bench.add_argument("--logs", type=Path, default=Path(".run"), help="folder for a pool's log")
    bench.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    control = commands.add_parser("pool-control", help="the pool's control loop, simulated")
    control.add_argument("--seed", type=int, default=0)
    control.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    control.add_argument("--plot", type=Path, help="PNG")
    queueing = commands.add_parser("pool-queueing", help="bursts of searches, in simulated time")
    queueing.add_argument("--loads", type=float, nargs="+", default=[0.15, 0.2, 0.25, 0.3, 0.7])
    queueing.add_argument("--seeds", type=int, default=5, help="how many; the medians are told")
    queueing.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    soak = commands.add_parser("pool-soak", help="searches without end, and nothing may be wrong")
    soak.add_argument("--searches", type=int, default=10_000_000)
    soak.add_argument("--seed", type=int, default=0)
    soak.add_argument("--out", type=Path, help="append the raw row to this JSONL file")
    soak.add_argument("--logs", type=Path, default=Path(".run/pool-soak"))


def run(options: argparse.Namespace) -> int:
    if options.command == "pool-control":
        from . import control as pool_control

        return pool_control.run(options.seed, options.out, options.plot)
    if options.command == "pool-queueing":
        from . import queueing as pool_queueing

        return pool_queueing.run(options.loads, options.seeds, options.out)
    if options.command == "pool-soak":
        from . import soak as pool_soak

        return pool_soak.run(options.searches, options.seed, options.out, options.logs)
    from . import bench as bench_pool

    plan = bench_pool.Plan(
        files=tuple(options.sentences),
        sentences=options.count,
        shortest=options.shortest,
        large=options.large,
        queries=options.queries,
        rounds=options.rounds,
        burst_s=options.burst_s,
        threads=options.threads,
        seed=options.seed,
        cache=options.cache,
        logs=options.logs,
    )
    return bench_pool.run(plan, options.out)
