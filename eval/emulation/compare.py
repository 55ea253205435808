"""``ppd-eval emulate compare``: the simulator on the inputs of emulated runs.

Both have the same profile, link, conversations, policy and pacer. The simulator has no host. So the
host's share of an emulated time is a part of the difference. Another part is chance: when a turn
meets a step of the other worker. The interval of a bootstrap over conversations has its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ppd.errors import ConfigError
from ppd.policies import static_policy

from ..profiles.profile import load_profile
from ..simulation.planned import simulated
from ..simulation.profile_costs import ProfileCosts
from ..simulation.rows import TurnRow
from ..simulation.simulator import Simulation
from ..simulation.traffic import Clients
from ..simulation.workers import Chunking, PlacementRule, Shape
from .clusters import Run, median, ranks_of, roles_of
from .workers import APPEND_CHUNK, PREFILL_CHUNK

_RUN_FIELDS = tuple(Run.__dataclass_fields__)
_OF_A_RUN = ("shape", "profile", "calibration", *_RUN_FIELDS)
_COUNTED = ("conversation", "turn", "output_tokens", "ttft_ms", "tpot_ms")
_DRAWS = 2000

Metrics = dict[str, list[tuple[int, float]]]
"""Of each median that a run's row has: conversation and value of each turn that it is of."""


def compare(row: dict[str, Any], turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Simulate the run of a row; return a row for each metric of both.

    Args:
        row: of a run.
        turns: rows of its turns, and maybe of others.

    Raises:
        ConfigError: the workload has pauses of two kinds, the run speculated, or its profile is not
            there.
    """
    run = Run(**{name: row[name] for name in _RUN_FIELDS if name in row})
    if run.drafts:
        raise ConfigError("the simulator has no speculative decoding: leave out runs with --drafts")
    found, plain = (
        values(simulate(run, row["shape"], row["profile"], row["calibration"], overlap=overlap))
        for overlap in (True, False)
    )
    own = [turn for turn in turns if all(turn.get(name) == row.get(name) for name in _OF_A_RUN)]
    measured = _values(tuple(map(turn.get, _COUNTED)) for turn in own if not turn["error"])
    rows = []
    for metric, of_turns in found.items():
        if not (of_turns and measured[metric]):
            continue
        value, emulated = middle(of_turns), middle(measured[metric])
        low, high = _interval(of_turns, measured[metric])
        rows.append(
            {
                "row": "comparison",
                "shape": row["shape"],
                "profile": row["profile"],
                "calibration": row["calibration"],
                **asdict(run),
                "metric": metric,
                "emulated": round(emulated, 3),
                "simulated": round(value, 3),
                "error": round(value / emulated - 1, 4),
                "error_interval": [round(low, 4), round(high, 4)],
                "simulated_without_overlap": round(middle(plain[metric]), 3),
                "emulated_commit": row["commit"],
            }
        )
    return rows


def simulate(
    run: Run, shape: str, profile: str, calibration: str, *, overlap: bool = True
) -> list[TurnRow]:
    """Simulate a run, and return its turns.

    Args:
        overlap: a step is launched while the one before it runs, as in SGLang.
    """
    names = [name for name, _ in roles_of(shape)]
    count = {kind: sum(name.startswith(kind) for name in names) for kind in "pdr"}
    simulation = Simulation(
        ProfileCosts(load_profile(profile, calibration), run.link_gbps, overlap=overlap),
        Shape(count["p"], 0, count["d"], count["r"], ranks=(1, 1, ranks_of(shape), 1)),
        static_policy(run.policy),
        Clients(),
        run.seed,
        delta=True,
        chunking=Chunking(PREFILL_CHUNK, APPEND_CHUNK),
        placement=PlacementRule(f"router-{run.placement}"),
    )
    return simulation.run(simulated(run.plan())).rows


def values(turns: Iterable[TurnRow]) -> Metrics:
    """Return what the medians of a run's row are of."""
    return _values(
        (turn.session, turn.turn, turn.output_tokens, turn.ttft_ms, turn.tpot_ms)
        for turn in turns
        if not turn.failed
    )


def _values(turns: Iterable[tuple[Any, ...]]) -> Metrics:
    """Of conversation, turn, output tokens, TTFT and TPOT of each turn."""
    found: Metrics = {"t1_ttft_p50_ms": [], "t2_ttft_p50_ms": [], "tpot_p50_ms": []}
    for conversation, turn, output_tokens, ttft_ms, tpot_ms in turns:
        name = "t1_ttft_p50_ms" if turn == 1 else "t2_ttft_p50_ms"
        found[name].append((conversation, ttft_ms))
        if output_tokens > 1:
            found["tpot_p50_ms"].append((conversation, tpot_ms))
    return found


def middle(of_turns: Sequence[tuple[int, float]]) -> float:
    """Return the median as a run's row has it, a value that was measured; of some turns."""
    found = median([value for _, value in of_turns])
    assert found is not None
    return found


def _interval(
    simulated: Sequence[tuple[int, float]], emulated: Sequence[tuple[int, float]]
) -> tuple[float, float]:
    """The 95 % interval of the error: both have the same conversations in each draw."""
    source = np.random.default_rng(0)
    # Those that both have: what failed in one of them is left out of the interval.
    conversations = sorted({one for one, _ in simulated} & {one for one, _ in emulated})
    both = [_by_conversation(one, conversations) for one in (simulated, emulated)]
    errors = []
    for drawn in source.integers(0, len(conversations), (_DRAWS, len(conversations))):
        value, measured = (
            np.quantile(np.concatenate([one[i] for i in drawn]), 0.5, method="inverted_cdf")
            for one in both
        )
        errors.append(value / measured - 1)
    low, high = np.quantile(errors, (0.025, 0.975))
    return float(low), float(high)


def _by_conversation(
    of_turns: Sequence[tuple[int, float]], conversations: Sequence[int]
) -> list[list[float]]:
    found: dict[int, list[float]] = {conversation: [] for conversation in conversations}
    for conversation, value in of_turns:
        if conversation in found:
            found[conversation].append(value)
    return list(found.values())
