"""``ppd-eval rag``: the commands of chats with passages."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..options import Commands, add_out, cluster_options
from . import bench as bench_rag
from . import demo as demo_rag


def add_to(commands: Commands) -> None:
    """Declare ``rag demo`` and ``rag bench``."""
    pool = argparse.ArgumentParser(add_help=False, parents=[cluster_options()])
    pool.add_argument("--docs", type=Path, default=Path("docs"), help="Markdown to index")
    pool.add_argument(
        "--cache", type=Path, default=Path(".run/minilm"), help="folder of the sentence model"
    )
    demo = commands.add_parser(
        "demo",
        parents=[pool],
        help="chats with passages from a pool",
        description=(
            "Hold chats about Markdown files, with passages from a pool. The last line is "
            "one JSON object."
        ),
    )
    demo.add_argument("--record", type=Path, help="append the result to this JSONL file")
    demo.set_defaults(run=_demo)
    bench = commands.add_parser(
        "bench",
        parents=[pool],
        help="what retrieval costs, by where its passages go",
        description=(
            "Hold chats of ten turns without retrieval, with passages at the tail, with passages "
            "that later requests leave out, and with passages in the system prompt. Cached tokens "
            "and TTFT of each are compared. "
            "The last line is one JSON object."
        ),
    )
    bench.add_argument("--rounds", type=int, default=5)
    add_out(bench)
    bench.set_defaults(run=_bench)


def _demo(options: argparse.Namespace) -> int:
    return demo_rag.run(options.model, options.docs, options.cache, options.logs, options.record)


def _bench(options: argparse.Namespace) -> int:
    return bench_rag.run(
        options.model,
        options.docs,
        options.cache,
        options.rounds,
        options.out,
        options.logs,
    )
