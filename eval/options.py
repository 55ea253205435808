"""Command-line options that several commands of ``ppd-eval`` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

# argparse has no public name for what ``add_subparsers`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def cluster_options(default: str = "a small random one") -> argparse.ArgumentParser:
    """Return a parent parser with the options of commands that start real workers.

    Args:
        default: the model without ``--model``, for the help.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", type=_model, help=f"any SGLang model; default: {default}")
    add_logs(parser)
    return parser


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Declare ``--logs``."""
    parser.add_argument("--logs", type=Path, default=Path(".run"), help="folder for logs")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare ``--out``, which is optional: raw rows are appended to this file."""
    parser.add_argument("--out", type=Path, help="append raw rows to this JSONL file")


def _model(name: str) -> str | None:
    return name or None  # the Makefile passes an empty name for the default model
