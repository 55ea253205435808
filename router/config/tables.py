"""Selection of the decision table for the served model, and of the policy that uses it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.decision import Policy
from ppd.errors import TableError
from ppd.policies import static_policy
from ppd.score import Weights
from ppd.table import Table
from ppd.table_policy import TablePolicy

from .options import TABLE_POLICY, RouterConfig

logger = logging.getLogger("ppd.router.tables")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A decision table and the file it was read from.

    Attributes:
        digest: first 16 hexadecimal digits of the file's SHA-256, which identify it in logs.
    """

    path: Path
    digest: str
    table: Table


def make_policy(
    config: RouterConfig, models: Sequence[str], shape: str
) -> tuple[Policy, TableFile | None]:
    """Return the policy that ``config`` names, and the table it uses, if any.

    Args:
        config: with the policy's options.
        models: names of the served model.
        shape: of the cluster, to compare with the table's; "" before the first worker.

    Raises:
        TableError: the table cannot be read, is malformed, is for another model, or has no
            throughput although a weight of the configuration is of it.
    """
    if config.policy != TABLE_POLICY:
        return static_policy(config.policy), None
    path = config.table_of(models[0])
    given = Path(path) if path else None
    found = _shipped(models, _option(config)) if given is None else _given(given, models)
    if found is None:
        logger.warning(
            "no decision table for %s: later turns go by the threshold rule (reason "
            "unknown_cell) until one is measured (ppd-eval sweep) and given by %s",
            ", ".join(models),
            _option(config),
        )
    else:
        record = found.table.record
        provenance = record.provenance
        logger.info(
            "decision table %s: %s, %s, %s, %d cells",
            found.path,
            record.model,
            record.shape,
            provenance.hardware,
            len(record.cells),
        )
        if provenance.note:
            logger.warning("note in %s: %s", found.path, provenance.note)
        if is_empty(found):
            logger.warning("it has no measured cell: later turns go by the threshold rule")
        _check_weights(config, found)
        if shape not in ("", record.shape):
            logger.warning("it was measured on %s, this cluster is %s", record.shape, shape)
    policy = TablePolicy(
        found.table if found else None, config.corrections, config.append_budget_tokens
    )
    return policy, found


def _check_weights(config: RouterConfig, file: TableFile) -> None:
    owners: dict[str, Weights | None] = {"weights": config.weights}
    owners |= {f"tenants.{name}.weights": one.weights for name, one in config.tenants.items()}
    weighing = [name for name, weights in owners.items() if weights and weights.throughput]
    if weighing:
        try:
            file.table.require_throughput()
        except TableError as error:
            named = ", ".join(f"{name}.throughput" for name in weighing)
            raise TableError(f"{file.path}, of {named}: {error}") from error


def is_empty(table: TableFile | None) -> bool:
    """Return whether there is no decision table, or no measured cell in it."""
    return table is None or not any(cell.measured for cell in table.table.record.cells)


def _given(path: Path, models: Sequence[str]) -> TableFile:
    found = read_table(path)
    try:
        found.table.require(models)
    except TableError as error:
        raise TableError(f"{path}: {error}") from error
    return found


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


def _option(config: RouterConfig) -> str:
    return "models.NAME.table" if len(config.model_names) > 1 else "--table"


def _shipped(models: Sequence[str], option: str) -> TableFile | None:
    """Return the shipped table of a model; None if there is none.

    Args:
        models: names of the served model.
        option: that chooses a table.

    Raises:
        TableError: there are several. The operator must choose the one of the hardware.
    """
    here = Path(__file__).parents[1]
    folder = here.with_name("ppd_tables" if here.name == "ppd_router" else "tables")
    found = [
        file for file in map(read_table, sorted(folder.glob("*.json"))) if file.table.is_for(models)
    ]
    if len(found) > 1:
        paths = ", ".join(str(file.path) for file in found)
        raise TableError(f"several tables are for {', '.join(models)}: choose by {option}: {paths}")
    return found[0] if found else None
