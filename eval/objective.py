"""Command-line options of an operator's objective: weights, or targets."""

from __future__ import annotations

import argparse

from ppd.errors import ConfigError
from ppd.score import Objective, Targets, Weights


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Declare the options of an operator's weights."""
    parser.add_argument("--w-ttft", type=float)
    parser.add_argument("--w-tpot", type=float)
    parser.add_argument("--w-throughput", type=float)


def add_targets(parser: argparse.ArgumentParser) -> None:
    """Declare the options of an operator's latency targets."""
    parser.add_argument("--slo-ttft-ms", type=float)
    parser.add_argument("--slo-tpot-ms", type=float)


def objective_of(options: argparse.Namespace) -> Objective | None:
    """Return the weights or targets of a command line; None if there are none.

    Raises:
        ConfigError: weights or targets make no sense, or both are given.
    """
    given = vars(options)
    weights = {
        name: weight
        for name in Weights.__struct_fields__
        if (weight := given.get(f"w_{name}")) is not None
    }
    targets = [given.get("slo_ttft_ms"), given.get("slo_tpot_ms")]
    objective: Objective | None = None
    if weights:
        objective = Weights(**weights)
    if targets != [None, None]:
        if objective is not None:
            raise ConfigError("give weights or targets, not both")
        objective = Targets(*targets)
    if objective is not None and (problem := objective.problem()):
        raise ConfigError(problem)
    return objective
