"""``ppd-eval bench hash``: what recognising a conversation costs the router."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import time

import orjson

from ppd.prefix import hash_messages

from .options import Commands
from .provenance import provenance


def add_to(commands: Commands) -> None:
    """Declare ``bench hash``."""
    parser = commands.add_parser(
        "hash",
        help="cost of recognising a conversation",
        description=(
            "Measure what it costs the router to recognise a conversation. The last line is "
            "one JSON object."
        ),
    )
    parser.add_argument("--history-kb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print one JSON line."""
    measured = measure(options.history_kb, options.rounds, options.seed)
    print(json.dumps({**measured, **provenance(options.seed)}))
    return 0


def measure(history_kb: int, rounds: int, seed: int) -> dict[str, float]:
    """Parse and hash one chat request of ``history_kb`` kilobytes ``rounds`` times."""
    source = random.Random(seed)
    letters = string.ascii_letters + string.digits + ' .,\n"'
    messages: list[dict[str, str]] = []
    left = history_kb * 1000
    while left > 0:
        size = min(left, source.choice((80, 400, 2000, 8000)))
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": "".join(source.choices(letters, k=size))})
        left -= size
    body = orjson.dumps({"model": "m", "messages": messages})
    parse_ms, both_ms = [], []
    for _ in range(rounds):
        start_s = time.perf_counter()
        parsed = orjson.loads(body)
        parsed_s = time.perf_counter()
        hash_messages(b"salt", parsed["messages"])
        both_ms.append(1e3 * (time.perf_counter() - start_s))
        parse_ms.append(1e3 * (parsed_s - start_s))
    return {
        "body_bytes": len(body),
        "messages": len(messages),
        "parse_ms": round(statistics.median(parse_ms), 3),
        "parse_and_hash_ms": round(statistics.median(both_ms), 3),
        "parse_and_hash_p99_ms": round(statistics.quantiles(both_ms, n=100)[98], 3),
        "rounds": rounds,
    }
