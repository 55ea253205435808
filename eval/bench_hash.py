"""``ppd-eval bench-hash``: what recognising a conversation costs the router."""

from __future__ import annotations

import json
import random
import statistics
import string
import time

import orjson

from ppd.prefix import hash_messages

from .provenance import provenance


def run(history_kb: int, rounds: int, seed: int) -> int:
    """Parse and hash one chat request of ``history_kb`` again and again; print one JSON line."""
    print(json.dumps({**measure(history_kb, rounds, seed), **provenance(seed)}))
    return 0


def measure(history_kb: int, rounds: int, seed: int) -> dict[str, float]:
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
