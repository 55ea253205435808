"""``ppd-eval load``: any workload against any ``/generate``, a router's or a plain SGLang server's.

Raw rows are written as turns end: one at the beginning of the run with its settings, one for each
turn, and one at the end with the summary. A run without its last row was cut short.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from ppd.errors import ConfigError, WorkerError

from .client import hold
from .endpoints import ANY_VOCABULARY, find_vocabulary, max_context_of
from .options import Commands, add_out
from .provenance import provenance
from .raw_rows import Write, appending
from .samples import Sample
from .summary import Latencies, Slo, Spread, Summary, summarize
from .traffic.conversations import Conversation
from .traffic.workloads import Demand, plan

_ASK_S = 10.0
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load, and the targets of its turns.

    Attributes:
        timeout_s: of a turn, from its send to its end.
        model: that the requests name; "": none.
        api_key: that they carry; "": none.
    """

    url: str
    timeout_s: float
    slo: Slo
    model: str = ""
    api_key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Of all requests."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def add_to(commands: Commands) -> None:
    """Declare ``load``."""
    load = commands.add_parser(
        "load",
        help="any workload against any /generate",
        description=(
            "Send a workload to a router or to a plain SGLang server, and print a summary. "
            "The last line is one JSON object. Failed turns are results: the status is 0. A "
            "wrong option, a conversation that is too long for the model, or a server that "
            "does not answer ends the command with status 1."
        ),
    )
    load.add_argument("--url", required=True, help="base URL of a router or of an SGLang server")
    load.add_argument("--workload", required=True, help="KIND:WHAT, see docs/WORKLOADS.md")
    load.add_argument("--model", default="", help="name of the model, where there are several")
    load.add_argument(
        "--api-key", help="of a router's tenant, or of the server; default: $PPD_API_KEY, or none"
    )
    load.add_argument(
        "--arrivals", help="replaces the workload's arrivals: 'poisson', or KIND:FILE of a trace"
    )
    load.add_argument(
        "--conversations", type=int, help="number of conversations; default: 200, or all of a file"
    )
    load.add_argument("--qps", type=float, help="conversations a second, as the paper counts")
    load.add_argument(
        "--scale", type=float, default=1.0, help="factor of all token counts, above 0 and at most 1"
    )
    load.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json of the model, or its folder; for workloads that are text",
    )
    load.add_argument("--slo-ttft-ms", type=float)
    load.add_argument("--slo-tpot-ms", type=float)
    load.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        help="time limit of a turn, from its request to its end",
    )
    load.add_argument("--seed", type=int, default=0)
    add_out(load)
    load.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Send a workload to a URL, and print the summary; the last line is one JSON object.

    Raises:
        ConfigError: an option or a workload's file is wrong.
        WorkerError: no server answers at the URL.
    """
    demand = Demand(
        spec=options.workload,
        arrivals=options.arrivals,
        conversations=options.conversations,
        qps=options.qps,
        scale=options.scale,
        seed=options.seed,
        tokenizer=options.tokenizer,
    )
    target = Target(
        options.url.rstrip("/"),
        options.timeout_s,
        Slo(options.slo_ttft_ms, options.slo_tpot_ms),
        options.model,
        options.api_key or os.environ.get("PPD_API_KEY", ""),
    )
    return run_load(demand, target, options.out)


def run_load(demand: Demand, target: Target, out: Path | None) -> int:
    """Send the conversations of ``demand`` to ``target``; raw rows go to ``out``."""
    _check(target)
    conversations = plan(demand)
    _allow_connections()
    with appending(out) as write:
        summary = uvloop.run(_measure(demand, target, conversations, write))
    _show(summary, target.slo)
    print(json.dumps({"part": "load", "workload": demand.spec, **asdict(summary)}))
    return 0


def _check(target: Target) -> None:
    if not target.url.startswith(("http://", "https://")):
        raise ConfigError(f"url must begin with http:// or https://, got {target.url}")
    for name, value in (
        ("timeout_s", target.timeout_s),
        ("slo_ttft_ms", target.slo.ttft_ms),
        ("slo_tpot_ms", target.slo.tpot_ms),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0, got {value:g}")


def _allow_connections() -> None:
    """As many as the system lets this process have: a turn that finds no descriptor would look
    like a drop."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _measure(
    demand: Demand, target: Target, conversations: Sequence[Conversation], write: Write
) -> Summary:
    vocabulary = await _ask(target, conversations, demand.scale)
    run = uuid.uuid4().hex[:12]
    asked = {"workload": demand.spec, "url": target.url, "timeout_s": target.timeout_s}
    asked |= {"asked_model": target.model} if target.model else {}
    asked |= {"slo": asdict(target.slo), "vocabulary": [vocabulary.start, vocabulary.stop]}
    asked |= {"demand": {**asdict(demand), "tokenizer": str(demand.tokenizer or "")}}
    write({"row": "begin", "part": "load", "run": run, **asked, **provenance(demand.seed)})
    turns = sum(len(conversation.turns) for conversation in conversations)
    progress = _Progress(turns)

    def ended(sample: Sample) -> None:
        label = conversations[sample.conversation].label
        write({"row": "turn", "run": run, "label": label, **asdict(sample)})
        progress.seen(sample)

    begun_s, cpu_s = time.perf_counter(), _cpu_s()
    samples = await hold(
        target.url,
        conversations,
        # Never twice the same: a server that is still up would have it in its cache.
        seed=f"{demand.spec}/{demand.seed}/{run}",
        vocabulary=vocabulary,
        silence_s=target.timeout_s,
        timeout_s=target.timeout_s,
        headers=target.headers,
        model=target.model,
        ended=ended,
    )
    wall_s = time.perf_counter() - begun_s
    summary = summarize(samples, conversations, wall_s, target.slo)
    totals = {"client_cpu": round((_cpu_s() - cpu_s) / wall_s, 3), **asdict(summary)}
    write({"row": "run", "part": "load", "run": run, **asked, **totals, **provenance(demand.seed)})
    return summary


async def _ask(target: Target, conversations: Sequence[Conversation], scale: float) -> range:
    """Return the token ids of prompts; check that a server answers and can hold them."""
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=target.headers) as http:
        try:
            most = await max_context_of(http, target.url, target.model)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = str(error) or type(error).__name__
            raise WorkerError(f"{target.url}: no answer: {problem}") from error
        vocabulary = await find_vocabulary(http, target.url)
    number, longest = max(
        (
            (number, conversation.longest_tokens)
            for number, conversation in enumerate(conversations)
        ),
        key=lambda numbered: numbered[1],
    )
    if most is not None and longest > most:
        raise ConfigError(
            f"conversation {number} grows to {longest} tokens, the model takes {most}: "
            f"--scale {scale * most / longest:.3g} or less, or a workload with ?max_context={most}"
        )
    return vocabulary or ANY_VOCABULARY


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Progress:
    """A line now and then on stderr."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._ended = self._failed = 0
        self._next_s = time.monotonic() + _PROGRESS_S

    def seen(self, sample: Sample) -> None:
        self._ended += 1
        self._failed += bool(sample.error)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_S
            line = f"  {self._ended} of {self._turns} turns, {self._failed} failed"
            print(line, file=sys.stderr, flush=True)


# -- what people read -----------------------------------------------------------------------

_COLUMNS = "{:<12} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10}"


def _show(summary: Summary, slo: Slo) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.failures.items()))
    unsent = summary.planned - summary.sent
    print(
        f"{summary.conversations} conversations, {summary.planned} turns in {summary.wall_s:.1f} s"
        f": {summary.ok} ok, {summary.failed} failed ({kinds or 'none'}), {unsent} never sent; "
        f"success rate {summary.success_rate:.1%}"
    )
    print(
        f"{summary.turns_per_s:g} turns/s, {summary.output_tokens_per_s:g} output tokens/s", end=""
    )
    if slo.given:
        assert summary.slo_share is not None
        targets = [("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)]
        named = ", ".join(f"{name} {ms:g} ms" for name, ms in targets if ms is not None)
        goodput = f"{summary.goodput_turns_per_s:g} turns/s ({summary.slo_share:.1%})"
        print(f"; goodput {goodput} within {named}", end="")
    print()
    if summary.routes:
        routes = ", ".join(f"{count} {route}" for route, count in sorted(summary.routes.items()))
        print(f"routes: {routes}", end="")
        print(
            "" if summary.cached_share is None else f"; cached {summary.cached_share:.1%} of later"
        )
    print(_COLUMNS.format("ms", "n", "mean", "p50", "p90", "p99", "max"))
    for turns in ("first", "later"):
        _show_latencies(turns, summary.latencies[turns])
    _show_spread("sent late", summary.late_ms)
    for note in summary.notes:
        print(f"note: {note}")


def _show_latencies(turns: str, latencies: Latencies) -> None:
    _show_spread(f"{turns} TTFT", latencies.ttft_ms)
    _show_spread(f"{turns} TPOT", latencies.tpot_ms)
    _show_spread(f"{turns} ITL", latencies.itl_ms)
    _show_spread(f"{turns} E2E", latencies.e2e_ms)


def _show_spread(name: str, spread: Spread | None) -> None:
    if spread is not None:
        figures = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        print(_COLUMNS.format(name, spread.n, *(f"{figure:.2f}" for figure in figures)))
