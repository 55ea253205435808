"""``ppd-eval sweep``: measures both routes over a grid, and builds and tries a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..options import Commands, cluster_options
from ..table import build, trial
from . import drive
from .config import load_config


def add_to(commands: Commands) -> None:
    """Declare ``sweep``."""
    parser = commands.add_parser(
        "sweep",
        parents=[cluster_options()],
        help="measure both routes in a grid",
        description=(
            "Measure both routes over a grid, all of it or the part that decisions depend "
            "on. It continues what the file of raw rows holds. With a table's path it "
            "builds the table and tries it."
        ),
    )
    parser.add_argument("config", type=Path, help="a TOML file, see eval/sweep/cpu.toml")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of raw rows; is continued")
    parser.add_argument("--table", type=Path, help="build it, and let a router try it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the raw file does not hold; then build and try the table, if one is named.

    Raises:
        ConfigError: a file is wrong, or cannot be written.
        WorkerError: no cluster is left, or no turn was decided by the new table.
    """
    config = load_config(options.config)
    if options.table is not None:
        config.require_table()
    drive.sweep(config, options.model, options.out, options.logs)
    if options.table is not None:
        summary = build.build(config, options.out, options.table)
        trial.run(config, options.model, options.table, summary, options.logs)
    return 0
