"""``ppd-eval compare``: the command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ppd.errors import ConfigError

from ..options import Commands, cluster_options
from . import drive, emulated, simulated, verdict
from .config import load_config


def add_to(commands: Commands) -> None:
    """Declare ``compare``."""
    compare = commands.add_parser(
        "compare",
        parents=[cluster_options()],
        help="every policy on the same real traffic",
        description=(
            "Serve the same real traffic with every policy, and print which one was better. "
            "The last line is one JSON object."
        ),
    )
    add_study(compare)
    compare.add_argument("--out", type=Path, required=True, help="JSONL of raw rows; is continued")
    compare.add_argument("--verdict-only", action="store_true", help="measure nothing")
    compare.add_argument(
        "--verdicts", type=Path, help="of a simulated cluster: append the verdicts to this file"
    )
    compare.add_argument(
        "--processes", type=int, help="of a simulated cluster; default: one a core"
    )
    compare.set_defaults(run=run)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Declare what is compared, for ``study_of``."""
    parser.add_argument("config", type=Path, help="a TOML file, see eval/compare/cpu.toml")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a file that the configuration names; may come again",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer of the model; for traces that are text"
    )
    parser.add_argument(
        "--table", type=Path, help="table of policy ppd; default on real workers: the shipped one"
    )


def study_of(options: argparse.Namespace) -> drive.Study:
    """Read what is compared.

    Raises:
        ConfigError: the configuration or an option is wrong.
    """
    files = dict(map(_named, options.data))
    return drive.Study(load_config(options.config), files, options.tokenizer, options.table)


def run(options: argparse.Namespace) -> int:
    """Measure what the raw file does not hold, and print the verdicts.

    Raises:
        ConfigError: a file cannot be read or written, or is not what it should be.
        WorkerError: a worker was lost.
        RefusedRunError: this machine was too slow to emulate a run.
    """
    config = load_config(options.config)
    if not options.verdict_only:
        study = study_of(options)
        if config.emulated is not None:
            emulated.run(study, config.emulated, options.out, options.logs)
        elif config.simulated is None:
            drive.run(study, options.model, options.out, options.logs)
        else:
            processes = os.cpu_count() or 1 if options.processes is None else options.processes
            if processes < 1:
                raise ConfigError(f"--processes must be at least 1, got {processes}")
            simulated.run(study, config.simulated, options.out, processes)
    return verdict.run(config, options.out, options.verdicts)


def _named(text: str) -> tuple[str, Path]:
    name, is_given, file = text.partition("=")
    if not (name and is_given and file):
        raise ConfigError(f"--data takes NAME=FILE, got {text!r}")
    return name, Path(file)
