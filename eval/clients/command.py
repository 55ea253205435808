"""``ppd-eval traffic clients``: clients of others, through the router, on real workers.

The ``openai`` and ``anthropic`` clients, four frameworks, SGLang's own ``sglang.benchmark.serving``
and NVIDIA's AIPerf each hold conversations of several turns. Frameworks also stream, call tools and
get objects. What clients count is compared with what the router counts; none of them may see an
error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ppd.contract import Role
from ppd.decision import Route
from ppd.outcome import Outcome

from .. import real_model
from ..cluster import ClientError, launching, share_flags, wait_all
from ..options import Commands, cluster_options
from ..prometheus import read_metrics
from ..provenance import provenance
from ..raw_rows import append_whole
from .generators import by_aiperf, by_sglang
from .programs import FRAMEWORKS, by_curl, by_framework
from .run import ClientRun
from .sdk import by_anthropic, by_openai

# A required call is JSON with this parser, and JSON has no blanks: both keep replies short.
_CONSTRAINED = ("--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace")

Client = Callable[[ClientRun], int | dict[str, int]]  # requests sent, or those of each case

_CLIENTS: dict[str, Client] = {
    "openai": by_openai,
    "anthropic": by_anthropic,
    **{name: partial(by_framework, name=name) for name in FRAMEWORKS},
    "curl --http2": by_curl,
    "sglang.benchmark.serving": by_sglang,
    "aiperf": by_aiperf,
}


def add_to(commands: Commands) -> None:
    """Declare ``traffic clients``."""
    parser = commands.add_parser(
        "clients",
        parents=[cluster_options("SmolLM2-135M-Instruct")],
        help="clients that others wrote",
        description=(
            "Send requests of OpenAI's and Anthropic's clients, of frameworks, of curl and of "
            "load generators through the router to real workers. The last line is one JSON object."
        ),
    )
    parser.add_argument("--clients", nargs="+", default=list(_CLIENTS), choices=list(_CLIENTS))
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path(".run/clients"),
        help="folder of the environments that clients are installed in, on the first run",
    )
    parser.add_argument("--out", type=Path, help="append the result to this JSONL file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Send requests by each client, and compare its count with the router's.

    Raises:
        ClusterError: a process did not start.
        ClientError: a client saw an error, or the router counted other requests than it.
    """
    served = real_model.choose(options.model)
    path, flags = served.path, (*served.worker_flags, *_CONSTRAINED)
    results: dict[str, Any] = {}
    with launching(options.logs) as launch:
        prefill = launch.worker(Role.PREFILL, path, *flags, *share_flags(0, 2))
        decode = launch.worker(Role.DECODE, path, *flags, *share_flags(1, 2))
        wait_all([prefill, decode])
        router = launch.router([prefill], [decode], "--policy", "full")
        wait_all([router])
        run_of = ClientRun(router.url, path, options.logs, options.environments)
        for name in options.clients:
            print(f"  {name}", file=sys.stderr, flush=True)
            before = _counted(router.url)
            found = _CLIENTS[name](run_of)
            cases = found if isinstance(found, dict) else {}
            sent = sum(cases.values()) if isinstance(found, dict) else found
            after = _counted(router.url)
            seen = {kind: after[kind] - before.get(kind, 0) for kind in after}
            results[name] = {"requests": sent, **{k: v for k, v in seen.items() if v}}
            results[name] |= {"cases": cases} if cases else {}
            # Some warm up with requests that they do not count.
            if seen[Outcome.OK] < sent or any(seen[kind] for kind in seen if kind in _FAILURES):
                raise ClientError(f"{name} sent {sent} requests, the router saw {seen}")
    line = {"part": "clients", "model": Path(path).name, **provenance(0), "clients": results}
    if options.out is not None:
        append_whole(options.out, [line])
    print(json.dumps(line))
    return 0


_FAILURES = (
    Outcome.REJECTED,
    Outcome.OVERLOADED,
    Outcome.WORKER_ERROR,
    Outcome.TRUNCATED,
    Outcome.INTERNAL_ERROR,
)


def _counted(url: str) -> dict[str, int]:
    """Requests by outcome and turns by route, as the router counts them."""
    counts: dict[str, int] = dict.fromkeys((Outcome.OK, *_FAILURES, *Route), 0)
    for name, labels, value in read_metrics(url):
        key = {"ppd_finished_total": "outcome", "ppd_turns_total": "route"}.get(name)
        if key is not None:
            counts[labels[key]] = counts.get(labels[key], 0) + round(value)
    return counts
