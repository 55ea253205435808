"""``ppd-eval bench interference``: decoding beside prefills, on one decode worker.

The PPD paper's figure: TPOT of running decodes against how many there are, with nothing else, with
one full prefill, one append-prefill, and four of each; for several contexts. Each prefill runs in
one chunk between two decode steps. Bounded chunks are there to prevent that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.contract import Role

from .. import tiny_model
from ..cluster import gpu_flags, launching, wait_all
from ..endpoints import empty_caches, vocabulary_of
from ..options import Commands, cluster_options
from ..provenance import provenance
from ..raw_rows import appending
from .client import EngineClient, gaps_ms

_KV = ("--max-total-tokens", "200000")
_NEW = 128
_BATCHES = (1, 2, 4, 8, 16)
_ARMS = ((0, "none"), (1, "full"), (1, "append"), (4, "full"), (4, "append"))


@dataclass(frozen=True, slots=True)
class Row:
    """TPOT of the decodes while prefills of one kind run beside them.

    It counts all gaps between their tokens from the send of the prefills to the first token of the
    last one.
    """

    round: int
    context: int
    batch: int
    prefills: int
    kind: str
    tpot_ms: float
    longest_gap_ms: float
    ttft_ms: float | None


def add_to(commands: Commands) -> None:
    """Declare ``bench interference``."""
    parser = commands.add_parser(
        "interference",
        parents=[cluster_options()],
        help="decode TPOT beside full and append-prefills",
        description=(
            "Measure the TPOT of running decodes beside full prefills and append-prefills, "
            "by batch and context."
        ),
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="JSONL of raw rows")
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, append raw rows, draw the plot; the last line on stdout is JSON."""
    path = tiny_model.resolve(options.model)
    rows: list[Row] = []
    with appending(options.out) as write, launching(options.logs) as launch:
        gpu = gpu_flags(0, 1)
        flags = [
            "--ppd-alternate",
            "--ppd-append-chunk",
            "65536",
            "--chunked-prefill-size",
            "65536",
        ]
        core = None if gpu else 1
        worker = launch.worker(Role.DECODE, path, *_KV, *gpu, *flags, core=core)
        wait_all([worker])

        def measured(row: Row) -> None:
            rows.append(row)
            write({**asdict(row), "model": Path(path).name, **provenance(0)})

        asyncio.run(_measure(worker.url, options.contexts, options.rounds, measured))
    cells = summarize([asdict(row) for row in rows])
    if options.plot is not None:
        draw(cells, options.plot)
    print(json.dumps({"cells": cells}))
    return 0


async def _measure(
    url: str, contexts: Sequence[int], rounds: int, measured: Callable[[Row], None]
) -> None:
    source = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        vocabulary = await vocabulary_of(http, url)
        client = EngineClient(http, "", url, 0, source)
        for number in range(-1, rounds):  # the first only warms up
            cells = [(c, b) for c in contexts for b in _BATCHES]
            source.shuffle(cells)
            for context, batch in cells[: len(cells) if number >= 0 else 2]:
                await empty_caches(http, [url])
                found = await _cell(client, vocabulary, context, batch)
                for (prefills, kind), (tpot, gap, ttft) in found if number >= 0 else ():
                    measured(Row(number, context, batch, prefills, kind, tpot, gap, ttft))
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)


async def _cell(
    client: EngineClient, vocabulary: range, context: int, batch: int
) -> list[tuple[tuple[int, str], tuple[float, float, float | None]]]:
    source = client.rooms

    def tokens(n: int) -> list[int]:
        return source.choices(vocabulary, k=n)

    histories = [tokens(context - _NEW) for _ in range(4)]
    for history in histories:  # what the append-prefills append to
        await client.local(history, 1)
    arms = list(_ARMS)
    source.shuffle(arms)
    found = []
    async with client.decoding([tokens(64) for _ in range(batch)], max_tokens=30_000) as decoding:
        for prefills, kind in arms:
            begun = len(decoding[0].arrived_s)
            await decoding[0].reaches(begun + 8)  # the arm before has ended
            from_s = decoding[0].arrived_s[-1]
            prompts = [
                (history if kind == "append" else tokens(len(history))) + tokens(_NEW)
                for history in histories[:prefills]
            ]
            replies = await asyncio.gather(*(client.local(prompt, 1) for prompt in prompts))
            if not replies:
                await decoding[0].reaches(begun + 40)
            to_s = max((r.arrived_s[0] for r in replies), default=decoding[0].arrived_s[-1])
            gaps = [gap for reply in decoding for gap in gaps_ms(reply, from_s, to_s)]
            ttft_ms = statistics.fmean(r.ttft_ms for r in replies) if replies else None
            found.append(((prefills, kind), (statistics.fmean(gaps), max(gaps), ttft_ms)))
    return found


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians over the rounds, and the ratio to decoding alone."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["context"], row["batch"], row["prefills"], row["kind"])
        cells.setdefault(key, []).append(row)
    median = {
        key: statistics.median(row["tpot_ms"] for row in found) for key, found in cells.items()
    }
    return [
        {
            "context": context,
            "batch": batch,
            "prefills": prefills,
            "kind": kind,
            "tpot_ms": round(median[context, batch, prefills, kind], 3),
            "tpot_ratio": round(
                median[context, batch, prefills, kind] / median[context, batch, 0, "none"], 3
            ),
            "longest_gap_ms": round(statistics.median(r["longest_gap_ms"] for r in found), 2),
        }
        for (context, batch, prefills, kind), found in sorted(cells.items())
    ]


_LOOKS = {
    (0, "none"): ("decoding alone", "0.4", ":"),
    (1, "append"): ("1 append-prefill", "tab:blue", "-"),
    (4, "append"): ("4 append-prefills", "tab:blue", "--"),
    (1, "full"): ("1 full prefill", "tab:red", "-"),
    (4, "full"): ("4 full prefills", "tab:red", "--"),
}


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel for each context: TPOT against batch size, a line an arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({cell["context"] for cell in cells})
    figure, (panels,) = pyplot.subplots(
        1, len(contexts), figsize=(3.6 * len(contexts), 3.9), sharey=True, squeeze=False
    )
    batches = sorted({cell["batch"] for cell in cells})
    for panel, context in zip(panels, contexts, strict=True):
        for arm, (label, color, style) in _LOOKS.items():
            line = sorted(
                (cell["batch"], cell["tpot_ms"])
                for cell in cells
                if cell["context"] == context and (cell["prefills"], cell["kind"]) == arm
            )
            panel.plot(*zip(*line, strict=True), style, color=color, marker=".", label=label)
        panel.set_yscale("log")
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_title(f"{context // 1024}k context, {_NEW} new tokens", fontsize=9)
        panel.set_xlabel("running decodes")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("TPOT while they run, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=130)
