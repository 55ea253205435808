"""Finding the decision table for the model that is served, and making the policy of it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.decision import Policy
from ppd.errors import TableError
from ppd.policies import static_policy
from ppd.table import Table
from ppd.table_policy import TablePolicy

from .options import TABLE_POLICY, RouterConfig

logger = logging.getLogger("ppd.router.tables")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table and where it was found; ``digest`` names its bytes in logs."""

    path: Path
    digest: str
    table: Table


def make_policy(
    config: RouterConfig, models: Sequence[str], shape: str
) -> tuple[Policy, TableFile | None]:
    """The policy that ``config`` names, for the workers that there are.

    Raises:
        TableError: the table cannot be read, is malformed, or of another model.
    """
    if config.policy != TABLE_POLICY:
        return static_policy(config.policy), None
    given = Path(config.table) if config.table else None
    found = _shipped(models) if given is None else _given(given, models)
    if found is None:
        logger.warning(
            "no decision table for %s: later turns go by the threshold rule (reason "
            "unknown_cell) until one is measured (ppd-eval sweep) and given by --table",
            ", ".join(models),
        )
    else:
        record = found.table.record
        made = record.provenance
        logger.info(
            "decision table %s: %s, %s, %s, %d cells",
            found.path,
            record.model,
            record.shape,
            made.hardware,
            len(record.cells),
        )
        if made.note:
            logger.warning("%s says: %s", found.path, made.note)
        if record.shape != shape:
            logger.warning("it was measured on %s, this cluster is %s", record.shape, shape)
    policy = TablePolicy(
        found.table if found else None, config.corrections, config.append_budget_tokens
    )
    return policy, found


def _given(path: Path, models: Sequence[str]) -> TableFile:
    found = read_table(path)
    try:
        found.table.require(models)
    except TableError as error:
        raise TableError(f"{path}: {error}") from error
    return found


def read_table(path: Path) -> TableFile:
    """
    Raises:
        TableError: it cannot be read, or is no table.
    """
    try:
        data = path.read_bytes()
        table = Table.parse(data)
    except (OSError, TableError) as error:
        raise TableError(f"{path}: {error}") from error
    return TableFile(path, hashlib.sha256(data).hexdigest()[:16], table)


def _shipped(models: Sequence[str]) -> TableFile | None:
    """The table of that model which came with this package.

    Raises:
        TableError: there are several; which one fits the hardware only the operator knows.
    """
    here = Path(__file__).parents[1]
    folder = here.with_name("ppd_tables" if here.name == "ppd_router" else "tables")
    found = [
        one for one in map(read_table, sorted(folder.glob("*.json"))) if one.table.is_for(models)
    ]
    if len(found) > 1:
        paths = ", ".join(str(one.path) for one in found)
        raise TableError(f"several tables are for {', '.join(models)}: choose by --table: {paths}")
    return found[0] if found else None
