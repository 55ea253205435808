"""Selection of the decision table for the served model, and of the policy that uses it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from ppd.decision import Policy
from ppd.errors import TableError
from ppd.machine import Machine
from ppd.policies import static_policy
from ppd.score import Weights
from ppd.table_policy import TablePolicy

from .options import TABLE_POLICY, RouterConfig
from .table_files import TableFile, read_table, shipped_tables

logger = logging.getLogger("ppd.router.tables")


def make_policy(
    config: RouterConfig, models: Sequence[str], shape: str, machines: Collection[Machine] = ()
) -> tuple[Policy, TableFile | None]:
    """Return the policy that ``config`` names, and the table it uses, if any.

    Args:
        config: with the policy's options.
        models: names of the served model.
        shape: of the cluster, to compare with the table's; "" before the first worker.
        machines: of the workers that report theirs.

    Raises:
        TableError: the table cannot be read, is malformed, is for another model, or has no
            throughput although a weight of the configuration is of it.
    """
    if config.policy != TABLE_POLICY:
        if path := config.table_of(models[0]):
            logger.warning("policy %s uses no table: %s is not read", config.policy, path)
        return static_policy(config.policy), None
    found = find_table(config, models, shape, machines)
    if found is None:
        option = "models.NAME.table" if len(config.model_names) > 1 else "--table"
        logger.warning(
            "no decision table for %s: later turns go by the threshold rule (reason "
            "unknown_cell) until one is measured (ppd-eval sweep) and given by %s",
            ", ".join(models),
            option,
        )
        if config.shipped_tables and not config.table_of(models[0]):
            for reason in shipped_tables(models, shape, machines).refused:
                logger.info("%s; %s chooses it all the same", reason, option)
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


def find_table(
    config: RouterConfig, models: Sequence[str], shape: str, machines: Collection[Machine]
) -> TableFile | None:
    """Return the table that the configuration names, or else the shipped one that fits.

    Args:
        config: with the options of tables.
        models: names of the served model.
        shape: of the cluster; "" before the first worker.
        machines: of the workers that report theirs.

    Raises:
        TableError: the table cannot be read, is malformed, or is for another model.
    """
    if path := config.table_of(models[0]):
        return _given(Path(path), models)
    return shipped_tables(models, shape, machines).one if config.shipped_tables else None


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
