"""``ppd-eval bench fault-table``: the same faults done to our router and to three others.

Every cell has a router and workers of its own, so that no cell sees what an earlier one has left;
the faults themselves are in ``rows.py``. Each of our cells is a test of the same name, too
(``tests/router/serving/test_fault_table.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from ..cluster import ClusterError, Launcher, Process, free_port
from ..fake_worker.worker import FakeWorker
from ..options import Commands, add_logs, add_out
from ..provenance import provenance
from ..raw_rows import appending
from ..routers import rivals as rival_routers
from .fixture import FaultFixture, faulty_workers
from .rows import ROWS, Cell, Row

MODEL = "fake"
OURS = ("ours, remote", "ours, local")
NAMES = (*OURS, *rival_routers.NAMES)
_START_S = 60.0


def own_router(port: int, prefill: Sequence[str], decode: Sequence[str], *more: str) -> list[str]:
    """The command line of our router: as a module, so that it is the one beside this package."""
    module = f"{__package__.removesuffix('eval.faults')}router.cli"
    return [
        *(sys.executable, "-m", module, "--port", str(port)),
        *("--prefill", *prefill, "--decode", *decode, *more),
    ]


async def _start(
    launch: Launcher,
    name: str,
    row: Row,
    prefill: FakeWorker,
    decode: Sequence[FakeWorker],
    rivals: Path,
) -> Process:
    urls = [worker.url for worker in decode]
    if name in OURS:
        port = free_port()
        config = launch.logs / f"{name.removeprefix('ours, ')}.toml"
        config.write_text(f"answer_timeout_s = {row.answer_timeout_s:g}\n")
        flags = ["--config", str(config), "--policy", "full", "--log-level", "warning"]
        argv = own_router(port, [prefill.url], urls, *flags)
        return launch.start("ours", port, argv)
    return rival_routers.start(launch, rival_routers.install(rivals), name, prefill.url, urls)


async def _until_ready(fixture: FaultFixture, process: Process) -> None:
    """Wait until a router answers.

    Raises:
        ClusterError: it does not, within a minute.
    """
    deadline_s = time.monotonic() + _START_S
    while True:
        reply = await fixture.ask_once()
        if reply.status == 200 and reply.whole:
            return
        if time.monotonic() > deadline_s or process.popen.poll() is not None:
            raise ClusterError(f"{process.name} is not ready: {reply.body!r}{process.tail()}")
        await asyncio.sleep(0.1)


async def cell(launch: Launcher, row: Row, name: str, rivals: Path) -> Cell:
    """Play one row against one router, with workers of its own."""
    prefill, decode, faults = faulty_workers(MODEL, row.decodes, row.ranks)
    for worker in (prefill, *decode):
        await worker.listen()
    process = await _start(launch, name, row, prefill, decode, rivals)
    try:
        port = int(process.url.rpartition(":")[2])
        fixture = FaultFixture(port, MODEL, prefill, decode, faults, local=name == OURS[1])
        await _until_ready(fixture, process)
        for worker in (prefill, *decode):
            worker.legs.clear()
        return await row.play(fixture)
    finally:
        process.stop()
        for worker in (prefill, *decode):
            await worker.close()


def _happens(row: Row, name: str) -> bool:
    """Whether a row has a cell for a router."""
    return name.removeprefix("ours, ") in row.routes if name in OURS else row.ranks == 1


async def table(
    launch: Launcher, names: Sequence[str], rows: Sequence[Row], rivals: Path
) -> list[dict[str, object]]:
    """A record for each cell; the cells of a row at the same time."""
    records: list[dict[str, object]] = []
    for row in rows:
        asked = [name for name in names if _happens(row, name)]
        cells = await asyncio.gather(*(cell(launch, row, name, rivals) for name in asked))
        for name, result in zip(asked, cells, strict=True):
            records.append(
                {"fault": row.name, "router": name, "right": result.right, "seen": result.words}
            )
            print(f"  {records[-1]}", file=sys.stderr, flush=True)
    return records


def show(records: Sequence[dict[str, object]], names: Sequence[str]) -> str:
    """Format the records as a table."""
    cells = {(str(record["fault"]), str(record["router"])): record for record in records}
    lines = [["", *names]]
    for fault in dict.fromkeys(str(one["fault"]) for one in records):
        line = [fault]
        for name in names:
            one = cells.get((fault, name))
            line.append(f"{'right' if one['right'] else 'WRONG'}: {one['seen']}" if one else "-")
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def add_to(commands: Commands) -> None:
    """Declare ``bench fault-table``."""
    parser = commands.add_parser(
        "fault-table",
        help="the same faults done to our router and to others",
        description=(
            "Inject the same faults into this router and into others, and print what each "
            "makes of them. The last line is one JSON object."
        ),
    )
    parser.add_argument("--routers", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows; default: all")
    parser.add_argument("--rivals", type=Path, default=Path(".run/rivals"))
    add_logs(parser)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Play the rows against each router, and print the table; the last line is one JSON object.

    Returns:
        The exit status: 1 if a cell of our router is wrong.
    """
    names, only, rivals, logs = options.routers, options.rows, options.rivals, options.logs
    if any(name not in OURS for name in names):
        rival_routers.install(rivals)  # not while others wait for it
    rows = ROWS if only is None else [ROWS[i - 1] for i in only]
    logs.mkdir(parents=True, exist_ok=True)
    with appending(options.out) as write, ExitStack() as stack:
        records = uvloop.run(table(Launcher(logs, stack), names, rows, rivals))
        for record in records:
            write({**record, **rival_routers.VERSIONS, **provenance(0)})
    print(show(records, names))
    wrong = {
        name: [o["fault"] for o in records if o["router"] == name and not o["right"]]
        for name in names
    }
    summary = {
        name: {"right": sum(o["router"] == name for o in records) - len(faults), "wrong": faults}
        for name, faults in wrong.items()
    }
    print(json.dumps(summary))
    return int(any(wrong.get(name) for name in OURS))
