"""``ppd-eval demo-rag``, ``bench-rag`` and ``rag-load``: their flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import bench as bench_rag
from . import demo as demo_rag
from . import load as rag_load


def add_parsers(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], cluster: argparse.ArgumentParser
) -> None:
    scene = argparse.ArgumentParser(add_help=False, parents=[cluster])
    scene.add_argument("--docs", type=Path, default=Path("docs"), help="Markdown to index")
    scene.add_argument(
        "--cache", type=Path, default=Path(".run/minilm"), help="of the sentence model"
    )
    demo = commands.add_parser("demo-rag", parents=[scene], help="chats with passages from a pool")
    demo.add_argument("--record", type=Path, help="append the result to this JSONL file")
    demo.set_defaults(run=_demo)
    bench = commands.add_parser(
        "bench-rag", parents=[scene], help="what retrieval costs, by where its passages go"
    )
    bench.add_argument("--rounds", type=int, default=5)
    bench.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    bench.set_defaults(run=_bench)
    load = commands.add_parser(
        "rag-load", parents=[scene], help="chats that retrieve, beside others' bursts of searches"
    )
    load.add_argument("--rounds", type=int, default=3)
    load.add_argument("--seconds", type=float, default=20.0, help="of each run")
    load.add_argument("--reply-tokens", type=int, default=256)
    load.add_argument("--every-tokens", type=int, default=64, help="between two searches")
    load.add_argument("--out", type=Path, help="append raw rows to this JSONL file")
    load.set_defaults(run=_load)


def _demo(options: argparse.Namespace) -> int:
    model = options.model or None
    return demo_rag.run(model, options.docs, options.cache, options.logs, options.record)


def _bench(options: argparse.Namespace) -> int:
    return bench_rag.run(
        options.model or None,
        options.docs,
        options.cache,
        options.rounds,
        options.out,
        options.logs,
    )


def _load(options: argparse.Namespace) -> int:
    return rag_load.run(
        options.model or None,
        options.docs,
        options.cache,
        rag_load.Plan(options.rounds, options.seconds, options.reply_tokens, options.every_tokens),
        options.out,
        options.logs,
    )
