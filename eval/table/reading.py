"""Tables from files, for commands that weigh what they hold."""

from __future__ import annotations

from pathlib import Path

from ppd.score import Weights
from ppd.table import Table


def read(path: Path, weights: Weights) -> Table:
    """Read a table.

    Raises:
        OSError: the file cannot be read.
        TableError: it is no table, or has nothing that one of the weights is of.
    """
    table = Table.parse(path.read_bytes())
    if weights.throughput:
        table.require_throughput()
    return table
