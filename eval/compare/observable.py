"""``ppd-eval simulate observable``: can a router find the decisions that foresight changes?

At each decision of ``ppd`` a simulation tries the other route, too (``deviations``). So it is known
what each route costs, with the turns after it. Three ways to choose are compared by the sum of
these costs:

- ``ppd`` itself.
- Foresight: the route that costs less.
- A learner: gradient-boosted trees predict which route costs less, from all numbers that the policy
  gets, and what its table has for the turn. They are trained on the other windows. These have many
  conversations in common with the window, and the best of some margins is chosen by its result.
  Both favour the learner.

If even so the learner saves little more than ``ppd``, these trees find hardly more in what the
policy gets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ppd.errors import ConfigError

from ..options import Commands, add_out
from ..provenance import provenance
from ..raw_rows import append_whole
from .command import add_study, study_of
from .config import Comparison
from .deviations import Deviation, deviations
from .simulated import read_table, windows_of
from .simulated_window import Cluster
from .way import label

_MARGINS = (0.0, 0.1, 0.2, 0.4)  # the learner changes decisions where its prediction is beyond
_BOUND = 3.0  # of a cost that is learned from: some are a hundred times as large as others
_LEAF = (20, 200)  # decisions in a leaf: a fiftieth of all, within these

Array = NDArray[np.float64]


def add_to(commands: Commands) -> None:
    """Declare ``simulate observable``."""
    parser = commands.add_parser(
        "observable",
        help="whether a router could find what foresight finds",
        description=(
            "Try the other route at each decision of ppd, and learn from the router's state which "
            "one costs less. The last line is one JSON object."
        ),
    )
    add_study(parser)
    parser.add_argument("--windows", type=int, default=6, help="of each trace, its first ones (6)")
    parser.add_argument("--processes", type=int, help="default: one a core")
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a row for each trace.

    Raises:
        ConfigError: an option or a file is wrong, or the comparison is not simulated.
    """
    if options.windows < 2:
        raise ConfigError(f"--windows must be at least 2, got {options.windows}")
    processes = options.processes
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {processes}")
    study = study_of(options)
    simulation = study.config.simulated
    if simulation is None or not simulation.clairvoyant:
        raise ConfigError(f"{options.config}: must have a section [simulated], with clairvoyant")
    if study.table is None:
        raise ConfigError("give --table: the table of ppd")
    windows = list(windows_of(replace(study, config=_first(study.config, options.windows))))
    cluster, weights = Cluster(simulation, read_table(study.table)), simulation.clairvoyant[0]
    assert cluster.table is not None
    work = partial(deviations, cluster, weights)
    found = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for trace in study.config.traces:
            places = [place for place in windows if place.trace.name == trace.name]
            every = list(chain.from_iterable(pool.imap(work, places)))
            found.append({"trace": trace.name, "windows": len(places), **saved(every)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            row = {
                "row": "observable",
                **found[-1],
                "weights": label(weights),
                "shape": simulation.shape,
                "horizon_s": simulation.horizon_s,
                "table": cluster.table.record.digest,
                **simulation.machine.provenance(),
                **provenance(0),
            }
            if options.out is not None:
                append_whole(options.out, [row])
    print(json.dumps({"traces": found}))
    return 0


def saved(every: Sequence[Deviation]) -> dict[str, Any]:
    """Return what ways to choose save in the mean, against remote turns alone.

    Returns:
        ``decisions``, and for each way the mean over them. ``learner_ahead`` counts the windows in
        which the learner saves more than ``ppd``. ``explained`` is its share of the variance of
        costs (R^2), which are bounded as those that it learns from.
    """
    costs = np.array([one.local_costs for one in every])
    is_local = np.array([one.is_local for one in every])
    seeds = np.array([one.seed for one in every])
    bounded = np.clip(costs, -_BOUND, _BOUND)
    predicted = _predicted(every, bounded, seeds)

    def mean(local: NDArray[np.bool_]) -> float:
        return float(np.mean(-costs * local))

    learners = [np.where(is_local, predicted < by, predicted < -by) for by in _MARGINS]
    best = max(learners, key=mean)
    gained = costs * is_local - costs * best
    ahead = [float(np.sum(gained[seeds == seed])) > 0.0 for seed in np.unique(seeds)]
    residual = np.mean((bounded - predicted) ** 2)
    return {
        "decisions": len(every),
        "local": round(mean(np.ones_like(is_local)), 4),
        "ppd": round(mean(is_local), 4),
        "learner": round(mean(best), 4),
        "learner_ahead": sum(ahead),
        "foresight": round(mean(costs < 0.0), 4),
        "explained": round(1.0 - float(residual / np.var(bounded)), 3),
    }


def _predicted(every: Sequence[Deviation], costs: Array, seeds: NDArray[np.int64]) -> Array:
    """Predict the costs in each window by trees that are fitted to the others."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # it takes a second to import

    observed = np.array([(*one.observed, one.is_local) for one in every])
    predicted = np.zeros(len(every))
    for seed in np.unique(seeds):
        here = seeds == seed
        leaf = int(np.clip(np.sum(~here) // 50, *_LEAF))
        trees = HistGradientBoostingRegressor(
            learning_rate=0.05, max_leaf_nodes=8, min_samples_leaf=leaf, random_state=0
        )
        trees.fit(observed[~here], costs[~here])
        predicted[here] = trees.predict(observed[here])
    return predicted


def _first(config: Comparison, windows: int) -> Comparison:
    """Return the comparison of the first windows of each trace."""
    traces = tuple(
        structs.replace(trace, seeds=config.seeds_of(trace)[:windows]) for trace in config.traces
    )
    return structs.replace(config, traces=traces)
