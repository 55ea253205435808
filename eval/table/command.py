"""``ppd-eval table``: the commands that build and inspect decision tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppd.errors import ConfigError, TableError
from ppd.score import Weights

from ..objective import add_weights, objective_of
from ..options import Commands
from ..sweep.config import load_config
from . import build, diff, lint, schema, show


def add_to(commands: Commands) -> None:
    """Declare ``table build``, ``show``, ``lint``, ``diff`` and ``schema``."""
    build_parser = commands.add_parser(
        "build",
        help="from a sweep's raw rows",
        description="Build a decision table from a sweep's raw rows.",
    )
    build_parser.add_argument("config", type=Path, help="configuration of the sweep")
    build_parser.add_argument("raw", type=Path, help="raw rows of the sweep")
    build_parser.add_argument("--out", type=Path, required=True)
    build_parser.set_defaults(run=_build)

    one_table = argparse.ArgumentParser(add_help=False)
    one_table.add_argument("file", type=Path)
    add_weights(one_table)
    show_parser = commands.add_parser(
        "show",
        parents=[one_table],
        help="a heat map of its choices",
        description="Print a heat map of a table's choices.",
    )
    show_parser.add_argument("--cells", action="store_true", help="and what each cell holds")
    show_parser.add_argument("--png", type=Path, help="also as a picture")
    show_parser.set_defaults(run=_show)
    lint_parser = commands.add_parser(
        "lint",
        parents=[one_table],
        help="what is doubtful in it",
        description="Print what is doubtful in a table.",
    )
    lint_parser.set_defaults(run=_lint)

    diff_parser = commands.add_parser(
        "diff",
        help="what changed between two",
        description="Print what changed between two tables.",
    )
    diff_parser.add_argument("old", type=Path)
    diff_parser.add_argument("new", type=Path)
    add_weights(diff_parser)
    diff_parser.set_defaults(run=_diff)
    schema_parser = commands.add_parser(
        "schema",
        help="the JSON schema of the format",
        description="Print the JSON schema of the table format.",
    )
    schema_parser.set_defaults(run=lambda _: schema.run())


def _build(options: argparse.Namespace) -> int:
    print(json.dumps(build.build(load_config(options.config), options.raw, options.out)))
    return 0


def _show(options: argparse.Namespace) -> int:
    with _reading(options.file):
        return show.run(options.file, _weights(options), options.cells, options.png)


def _lint(options: argparse.Namespace) -> int:
    with _reading(options.file):
        return lint.run(options.file, _weights(options))


def _diff(options: argparse.Namespace) -> int:
    with _reading(f"{options.old} or {options.new}"):
        return diff.run(options.old, options.new, _weights(options))


def _weights(options: argparse.Namespace) -> Weights:
    weights = objective_of(options) or Weights()
    assert isinstance(weights, Weights)  # these commands have no targets
    return weights


@contextmanager
def _reading(name: Path | str) -> Iterator[None]:
    """Name the file in errors of reading it.

    Raises:
        ConfigError: a file cannot be read.
        TableError: a file is no table.
    """
    try:
        yield
    except BrokenPipeError:  # of standard output, not of a table
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except TableError as error:
        raise TableError(f"{name}: {error}") from error
