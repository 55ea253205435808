"""``ppd-eval simulate cpu``: the simulator against a real cluster, from a sweep's raw rows.

The cost model is fitted to the sweep's quiet runs, in which nothing waits. What happens under
load, on either route, is then predicted and compared.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.policies import static_policy
from ppd.score import Weights, score
from ppd.table import Costs

from ..provenance import provenance
from ..raw_rows import append_whole
from ..sweep.config import Place, SweepConfig, Workload, plan
from ..sweep.rows import read_runs
from .cost_model import CostModel, Gpu, ModelSizes, Serving
from .fit import fit
from .simulator import Simulation
from .traffic import Clients, Conversation, TurnTokens
from .workers import Chunking, Shape

# ``eval.tiny_model``'s default. What it is made of only scales what is fitted.
TINY = ModelSizes(
    name="tiny-llama",
    parameters=0.81e6,
    layer_parameters=0.786e6,
    layers=4,
    hidden=128,
    kv_heads=2,
    head_dim=32,
    bytes_per_value=4,
)
CORE = Gpu(name="a CPU core", peak_flops=4e11, memory_bytes_per_s=1e10, memory_bytes=8e9)
_START = Serving(
    compute_share=0.25,
    attention_share=0.1,
    memory_share=0.4,
    step_ms=2.5,
    sequence_ms=0.5,
    request_ms=8.0,
    handover_ms=6.0,
    link_bytes_per_s=2e8,
    memory_used_share=0.1,
    activation_bytes=1e6,
)
_FREE = (
    "compute_share",
    "attention_share",
    "memory_share",
    "step_ms",
    "request_ms",
    "handover_ms",
    "link_bytes_per_s",
)
_STEP_TOKENS = 512  # of a chunk: ppd-worker's on CPUs
_ROUNDS = 5
_APART_S = 1e4
_SHAPES = {Route.REMOTE: "1P_1D", Route.LOCAL: "1P_1pD"}

Key = tuple[Workload, int | None, Route]


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians of the turns of a cell's runs: of later ones, and the TTFT of first ones."""

    first_ttft_ms: float
    ttft_ms: float
    tpot_ms: float


def run(config: SweepConfig, raw: Path, *, paced: bool, out: Path | None) -> int:
    """Print one JSON line.

    Args:
        paced: the sweep's decode workers bounded their chunks by ``ppd.pacing``.

    Raises:
        ConfigError: ``raw`` does not hold the whole sweep.
    """
    seen = measured(config, raw)
    quiet = [key for key in seen if key[1] is None]
    loaded = [key for key in seen if key[1] is not None]
    if not quiet or len(quiet) * len(config.axes.qps) != len(loaded):
        raise ConfigError(f"{raw}: not a whole sweep of this configuration")

    chunking = Chunking(_STEP_TOKENS, _STEP_TOKENS if paced else None)

    def errors(serving: Serving) -> list[float]:
        costs = CostModel(TINY, CORE, serving)
        return [
            off
            for key in quiet
            for off in _off(simulate(config, key, config.seeds[:1], costs, chunking), seen[key])
        ]

    serving = fit(_START, _FREE, errors)
    costs = CostModel(TINY, CORE, serving)
    made = {key: simulate(config, key, config.seeds, costs, chunking) for key in (*quiet, *loaded)}
    rows = [
        {
            "row": "cell",
            "workload": key[0],
            "qps": key[1],
            "route": key[2],
            "measured": asdict(seen[key]),
            "simulated": asdict(made[key]),
        }
        for key in (*quiet, *loaded)
    ]
    same = [_prefers_local(seen, key) is _prefers_local(made, key) for key in _pairs(loaded)]
    summary: dict[str, object] = {
        "cells": len(seen),
        "paced": paced,
        "fitted": asdict(serving),
        "quiet": _spread(seen, made, quiet),
        "remote": _spread(seen, made, [key for key in loaded if key[2] is Route.REMOTE]),
        "local": _spread(seen, made, [key for key in loaded if key[2] is Route.LOCAL]),
        "ttft_saved_off_points": _saved_off(seen, made, loaded),
        "same_choice": f"{sum(same)} of {len(same)}",
        **provenance(config.seeds[0]),
    }
    if out is not None:
        append_whole(out, (*rows, summary))
    print(json.dumps(summary))
    return 0


def measured(config: SweepConfig, raw: Path) -> dict[Key, Medians]:
    """Read a sweep's medians by cell and route."""
    turns: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for result in read_runs(config, raw):
        if result.run.route is not None:
            key = (result.run.place.workload, result.run.place.qps, result.run.route)
            turns[key] += [turn for turn in result.turns if not turn["error"]]
    return {
        key: _medians([(turn["turn"], turn["ttft_ms"], turn["tpot_ms"]) for turn in of_key])
        for key, of_key in turns.items()
    }


def simulate(
    config: SweepConfig, key: Key, seeds: Sequence[int], costs: CostModel, chunking: Chunking
) -> Medians:
    """Simulate the conversations of a cell on a worker whose pacer is warm.

    The cluster's had served the whole sweep before. So only the last of several rounds counts.
    """
    workload, qps, route = key
    conversations: list[Conversation] = []
    start_s = 0.0
    for seed in (*seeds,) * _ROUNDS:
        for number, conversation in enumerate(plan(config, Place(workload, qps), seed)):
            if qps is None and number:  # held one after the other
                start_s += _APART_S
            conversations.append(
                Conversation(
                    session=len(conversations),
                    at_s=start_s + conversation.starts_at_s,
                    turns=tuple(
                        TurnTokens(e.new_tokens, e.output_tokens) for e in conversation.turns
                    ),
                    think_s=tuple(e.think_s for e in conversation.turns[1:]),
                )
            )
        start_s += _APART_S
    simulation = Simulation(
        costs,
        Shape.parse(_SHAPES[route]),
        static_policy("full"),
        Clients(),
        seeds[0],
        delta=True,
        chunking=chunking,
    )
    counted = len(conversations) * (_ROUNDS - 1) // _ROUNDS
    return _medians(
        [
            (row.turn, row.ttft_ms, row.tpot_ms)
            for row in simulation.run(conversations).rows
            if row.session >= counted
        ]
    )


def _medians(turns: Sequence[tuple[int, float, float]]) -> Medians:
    later = [turn for turn in turns if turn[0] > 1]
    return Medians(
        statistics.median(ttft for number, ttft, _ in turns if number == 1),
        statistics.median(ttft for _, ttft, _ in later),
        statistics.median(tpot for _, _, tpot in later),
    )


def _off(made: Medians, seen: Medians) -> Iterator[float]:
    for name in Medians.__slots__:
        yield getattr(made, name) / getattr(seen, name) - 1


def _spread(
    seen: dict[Key, Medians], made: dict[Key, Medians], keys: Sequence[Key]
) -> dict[str, dict[str, float]]:
    """Percent: the median of errors with their signs, the median and the largest without."""
    spread = {}
    for place, name in enumerate(Medians.__slots__):
        errors = [100 * list(_off(made[key], seen[key]))[place] for key in keys]
        sizes = [abs(error) for error in errors]
        spread[name] = {
            "bias": round(statistics.median(errors), 1),
            "median": round(statistics.median(sizes), 1),
            "largest": round(max(sizes), 1),
        }
    return spread


def _pairs(keys: Sequence[Key]) -> list[Key]:
    return [key for key in keys if key[2] is Route.REMOTE]


def _prefers_local(cells: dict[Key, Medians], key: Key) -> bool:
    """Algorithm 1 with even weights."""
    remote, local = cells[key], cells[key[0], key[1], Route.LOCAL]
    return score(
        Weights(),
        Costs(remote.ttft_ms, remote.tpot_ms, 1.0, 1.0),
        Costs(local.ttft_ms, local.tpot_ms, 1.0, 1.0),
    ).prefers_local


def _saved_off(
    seen: dict[Key, Medians], made: dict[Key, Medians], keys: Sequence[Key]
) -> dict[str, float]:
    """The share of TTFT that local turns save: by how many percent points it is missed."""
    errors = [100 * (_saved(made, key) - _saved(seen, key)) for key in _pairs(keys)]
    return {
        "bias": round(statistics.median(errors), 1),
        "median": round(statistics.median(abs(error) for error in errors), 1),
        "largest": round(max(abs(error) for error in errors), 1),
    }


def _saved(cells: dict[Key, Medians], key: Key) -> float:
    return 1 - cells[key[0], key[1], Route.LOCAL].ttft_ms / cells[key].ttft_ms
