"""``ppd-eval``: demo, serve and benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ppd.decision import POLICIES
from ppd.errors import PpdError

from . import bench_hash, demo, serve


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
    two.add_argument("--policy", default="full", choices=POLICIES)
    two.add_argument("--port", type=int, default=0, help="of the router; 0: any free one")
    three = commands.add_parser("bench-hash", help="cost of recognising a conversation")
    three.add_argument("--history-kb", type=int, default=400)
    three.add_argument("--rounds", type=int, default=500)
    three.add_argument("--seed", type=int, default=0)

    options = parser.parse_args(argv)
    try:
        match options.command:
            case "demo":
                status = demo.run(
                    options.model or None, options.max_tokens, options.logs, options.record
                )
            case "serve":
                status = serve.run(
                    options.model or None, options.policy, options.port, options.logs
                )
            case _:
                status = bench_hash.run(options.history_kb, options.rounds, options.seed)
    except KeyboardInterrupt:
        sys.exit(130)
    except PpdError as error:
        sys.exit(f"ppd-eval: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
