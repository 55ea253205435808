"""A comparison on a simulated cluster: every way serves the same windows.

Rows are those of a real comparison. Besides, each weighting has a clairvoyant way, which shows what
better decisions could win (``clairvoyant``).
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ppd.errors import ConfigError
from ppd.table import Table

from ..provenance import provenance
from ..raw_rows import append_whole, end_last_line
from .config import Simulated, seeds_of, ways
from .drive import Study, measured
from .simulated_window import Cluster, Window, rows_of


def run(study: Study, simulation: Simulated, out: Path, processes: int) -> None:
    """Simulate the windows that ``out`` does not hold yet, and append them there.

    Raises:
        ConfigError: a trace, a profile or ``out`` cannot be read or written, or a conversation is
            too long for a worker.
    """
    windows, done = list(windows_of(study)), measured(out)
    left = [
        one
        for one in windows
        if any((one.trace.name, one.seed, way.name) not in done for way in one.ways)
    ]
    print(f"{len(left)} of {len(windows)} windows to simulate", file=sys.stderr, flush=True)
    cluster = Cluster(simulation, None if study.table is None else read_table(study.table))
    work = partial(rows_of, cluster)
    end_last_line(out)
    if not left:
        return
    # A new interpreter does not hold what this one does, so it forks faster. It notes the commit of
    # its code when it starts.
    with multiprocessing.get_context("spawn").Pool(
        min(processes, len(left)), initializer=provenance, initargs=(0,)
    ) as pool:
        for number, rows in enumerate(pool.imap_unordered(work, left), 1):
            new = [row for row in rows if (row["trace"], row["seed"], row["way"]) not in done]
            append_whole(out, new)
            last = rows[-1]
            print(
                f"{number}/{len(left)} {last['trace']} seed {last['seed']}",
                file=sys.stderr,
                flush=True,
            )


def read_table(path: Path) -> Table:
    """Read the table of ``ppd``.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Table.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error


def windows_of(study: Study) -> Iterator[Window]:
    """Read all windows.

    Raises:
        ConfigError: a trace cannot be read.
    """
    config, planned = study.config, study.windows()
    for trace in config.traces:
        for seed in config.seeds_of(trace):
            every = [way for way in ways(config) if seed in seeds_of(config, trace, way)]
            yield Window(trace, seed, every, config.rivals, planned[trace.name, seed])
