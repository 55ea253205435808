"""Files of decision tables, and those that come with the package."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.errors import TableError
from ppd.machine import Machine
from ppd.table import Table

_HERE = Path(__file__).parents[1]
# The folder of the tables that come with the package: in a checkout and in a wheel.
SHIPPED = _HERE.with_name("ppd_tables" if _HERE.name == "ppd_router" else "tables")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A decision table and the file it was read from.

    Attributes:
        digest: first 16 hexadecimal digits of the file's SHA-256, which identify it in logs.
    """

    path: Path
    digest: str
    table: Table

    def __str__(self) -> str:
        return f"{self.path.name} ({self.table.record.provenance.hardware})"


def read_table(path: Path) -> TableFile:
    """Read a decision table.

    Raises:
        TableError: the file cannot be read, or holds no decision table.
    """
    try:
        data = path.read_bytes()
        table = Table.parse(data)
    except (OSError, TableError) as error:
        raise TableError(f"{path}: {error}") from error
    return TableFile(path, hashlib.sha256(data).hexdigest()[:16], table)


@dataclass(frozen=True, slots=True)
class ShippedTables:
    """The shipped tables of a model.

    Attributes:
        one: the table that holds for the cluster; None if there is none.
        refused: why the others do not hold, a sentence each.
    """

    one: TableFile | None
    refused: tuple[str, ...] = ()


def shipped_tables(
    models: Sequence[str], shape: str, machines: Collection[Machine]
) -> ShippedTables:
    """Return the shipped tables of a model, and which of them holds for a cluster.

    A table without a machine is of a model that runs on any, and holds for all clusters. Another
    holds for its machine and shape. Of several that hold for a cluster, as of links that are not
    reported, none is chosen.

    Args:
        models: names of the served model.
        shape: of the cluster; "" before the first worker.
        machines: of the workers that report theirs.

    Raises:
        TableError: there are several without a machine. The operator must choose one.
    """
    files = map(read_table, sorted(SHIPPED.glob("*.json")))
    of_model = [file for file in files if file.table.is_for(models)]
    found = [file for file in of_model if _fits(file, shape, machines)]
    cluster = f"{shape or 'no workers yet'}, {_named(machines)}"
    refused = tuple(
        f"shipped table {file.path}: it is of {file.table.record.shape}, "
        f"{file.table.record.machine}; this cluster is of {cluster}"
        for file in of_model
        if file not in found
    )
    if len(found) < 2:
        return ShippedTables(found[0] if found else None, refused)
    if not all(file.table.record.machine for file in found):
        paths = ", ".join(str(file.path) for file in found)
        raise TableError(f"several shipped tables are for {', '.join(models)}: {paths}")
    also = tuple(f"shipped table {file.path}: several are of {cluster}" for file in found)
    return ShippedTables(None, also + refused)


def _fits(file: TableFile, shape: str, machines: Collection[Machine]) -> bool:
    record = file.table.record
    if record.machine is None:
        return True
    return record.shape == shape and bool(machines) and all(map(record.machine.fits, machines))


def _named(machines: Collection[Machine]) -> str:
    return " and ".join(sorted(map(str, machines))) or "unknown GPUs"
