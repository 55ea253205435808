"""``ppd-eval soak router``: our router under load while its workers die, hang and come back.

At the end its ``/metrics`` must agree with the clients' counts, every error must come from a
disruption of the workers, and nothing may be left: descriptors, legs, tokens, memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvloop

from ppd.outcome import Outcome

from ..cluster import free_port, launching
from ..faults.command import MODEL, own_router
from ..options import Commands, add_logs, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from .accounting import reconciled
from .drive import Run, Target, drive
from .schedule import WorkerProcesses, log_lines

# Short times, so that much happens; a small index, so that it is full early.
OPTIONS: dict[str, Any] = {
    "policy": "partial:0.7",
    "answer_timeout_s": 3.0,
    "idle_timeout_s": 3.0,
    "connect_timeout_s": 2.0,
    "probe_interval_s": 0.25,
    "session_capacity": 20_000,
    "breaker_open_s": 1.0,
    "resume_streams": 2,
    "decode_fallback": True,
}
ROLES = ("prefill", "prefill", "decode", "decode", "decode")
_BROKEN_OFF, _LEFT_ALONE = "truncated stream from", "fails request after request"
_FELL_BACK = "(decode_fallback)"
_GROWTH = 1.10  # of memory, from the first quarter to the end
_START_S = 60.0


def add_to(commands: Commands) -> None:
    """Declare ``soak router``."""
    parser = commands.add_parser(
        "router",
        help="our router under load while its workers die, hang and come back",
        description=(
            "Send requests to the router while its workers are killed, stopped, cut off and "
            "drained. Then the router's counts are compared with the clients'. The last "
            "line is one JSON object."
        ),
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    add_logs(parser)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the load; the last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a count differs, an error is unexplained or something is left.
    """
    requests, seed, logs = options.requests, options.seed, options.logs
    with launching(logs) as launch:
        workers = WorkerProcesses(launch, MODEL)
        for role in ROLES:
            workers.add(role)
        config = logs / "load-router.toml"
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in OPTIONS.items()]
        config.write_text("".join(lines))
        port = free_port()
        prefill, decode = (
            [slot.url for slot in workers.of(role)] for role in ("prefill", "decode")
        )
        more = ("--config", str(config), "--log-level", "warning")
        router = launch.start("load-router", port, own_router(port, prefill, decode, *more))
        router.wait_ready("/health", time.monotonic() + _START_S)
        done = uvloop.run(
            drive(Target(port, router.popen.pid), workers, requests, options.clients, seed)
        )
        logged, others = log_lines(router.log, (_BROKEN_OFF, _LEFT_ALONE, _FELL_BACK))
    result = summary(done, logged, others)
    if options.out is not None:
        records = [{**row, "options": OPTIONS, **provenance(seed)} for row in rows(done, result)]
        append_whole(options.out, records)
    print(json.dumps(result))
    return int(not result["clean"])


def summary(done: Run, logged: Counter[str], others: list[str]) -> dict[str, Any]:
    """Summarize a run as one JSON object.

    Args:
        logged: errors of known kinds in the router's log; ``others``: all others.
    """
    shared, router_counts, rss_mb = done.shared, done.router_counts, done.rss_mb
    counts = shared.counts
    outcomes, routes = Counter[str](), Counter[str]()
    for (_, outcome), count in counts.finished.items():
        outcomes[outcome] += count
    for (_, route, reason), count in counts.turns.items():
        routes[f"{route} {reason}"] += count
    differences = done.differences
    # One that a client has hung up on while it was to go on elsewhere is only logged.
    broken_off = outcomes[Outcome.TRUNCATED] + router_counts.resumed
    if not 0 <= logged[_BROKEN_OFF] - broken_off <= outcomes[Outcome.DISCONNECTED]:
        differences.append(f"broken off: {broken_off} seen, {logged[_BROKEN_OFF]} logged")
    clean = (
        not differences
        and not counts.unexplained
        and not others
        and done.descriptors[1] <= done.descriptors[0]
        and not router_counts.in_flight
        and not router_counts.backlog_tokens
        and _flat(rss_mb, sum(shared.kinds.values()))
    )
    return {
        "clean": clean,
        "requests": sum(shared.kinds.values()),
        "seconds": round(done.seconds, 1),
        "kinds": dict(shared.kinds),
        "outcomes": dict(outcomes),
        "routes": dict(routes),
        "troubles": dict(Counter(event.disruption.value for event in done.injections)),
        "counted_otherwise": reconciled(counts, router_counts)[1],
        "differences": differences[:20],
        "errors_explained": dict(counts.explained),
        "seen_back_after_s": round(counts.seen_back_after_s, 2),
        "unexplained": len(counts.unexplained),
        "unexplained_first": counts.unexplained[:5],
        "streams_resumed": router_counts.resumed,
        "logged_errors": {**logged, "others": len(others), "first": others[:5]},
        "descriptors": list(done.descriptors),
        "in_flight": router_counts.in_flight,
        "backlog_tokens": router_counts.backlog_tokens,
        "rss_mb": rss_mb,
    }


def _flat(rss_mb: dict[float, float], requests: int) -> bool:
    """Memory is, once the index of finished turns is full; a short load does not fill it."""
    full = 0.25 * requests > 2 * OPTIONS["session_capacity"]
    return not full or rss_mb[1.0] <= _GROWTH * rss_mb[0.25]


def rows(done: Run, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the raw rows of a run: its summary, then each count of clients and router."""
    yield {"part": "summary", **result}
    counts, router_counts = done.shared.counts, done.router_counts
    for name, mine, theirs in (
        ("finished", counts.finished, router_counts.finished),
        ("turns", counts.turns, router_counts.turns),
    ):
        for key in sorted(mine.keys() | theirs.keys()):
            yield {"part": name, "of": key, "client": mine[key], "router": theirs[key]}
