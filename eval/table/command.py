"""``ppd-eval table``: its flags."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ppd.errors import ConfigError, TableError
from ppd.score import Weights

from ..objective import add_targets, add_weights, objective_of
from ..sweep.config import load_config
from . import build, diff, effort, lint, rescore, show


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    table = commands.add_parser("table", help="decision tables")
    kinds = table.add_subparsers(dest="table_command", required=True)
    of_sweep = argparse.ArgumentParser(add_help=False)
    of_sweep.add_argument("config", type=Path, help="of the sweep")
    of_sweep.add_argument("raw", type=Path, help="what the sweep wrote")
    made = kinds.add_parser("build", parents=[of_sweep], help="from a sweep's raw rows")
    made.add_argument("--out", type=Path, required=True)
    kinds.add_parser(
        "effort", parents=[of_sweep], help="what an adaptive sweep would have saved of a full one"
    )
    of_table = argparse.ArgumentParser(add_help=False)
    of_table.add_argument("file", type=Path)
    add_weights(of_table)
    shown = kinds.add_parser("show", parents=[of_table], help="a heat map of what it chooses")
    shown.add_argument("--cells", action="store_true", help="and what each cell holds")
    shown.add_argument("--png", type=Path, help="also as a picture")
    scored = kinds.add_parser("score", parents=[of_table], help="what other wishes would choose")
    add_targets(scored)
    kinds.add_parser("lint", parents=[of_table], help="what is doubtful in it")
    other = kinds.add_parser("diff", help="what changed between two")
    other.add_argument("old", type=Path)
    other.add_argument("new", type=Path)
    add_weights(other)


def run(options: argparse.Namespace) -> int:
    """Raises:
    ConfigError: a file cannot be read or written, or an option is wrong.
    TableError: a file is no table.
    """
    match options.table_command:
        case "build":
            told = build.build(load_config(options.config), options.raw, options.out)
            print(json.dumps(told))
            return 0
        case "effort":
            return effort.run(load_config(options.config), options.raw)
    objective = objective_of(options)
    try:
        if options.table_command == "score":
            return rescore.run(options.file, [objective] if objective else [])
        weights = objective or Weights()
        assert isinstance(weights, Weights)
        match options.table_command:
            case "show":
                return show.run(options.file, weights, options.cells, options.png)
            case "lint":
                return lint.run(options.file, weights)
            case "diff":
                return diff.run(options.old, options.new, weights)
    except BrokenPipeError:  # no file of ours: whoever reads what is printed has seen enough
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except TableError as error:
        named = getattr(options, "file", None) or f"{options.old} or {options.new}"
        raise TableError(f"{named}: {error}") from error
    raise AssertionError(options.table_command)
