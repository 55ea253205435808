"""``ppd-eval emulate compare``: the simulator on the inputs of emulated runs.

Both have the same profile, link, conversations, policy and pacer. The simulator has no host. So the
host's share of an emulated time is a part of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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


def compare(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Simulate the run of a row; return a row for each metric of both.

    Raises:
        ConfigError: the workload has pauses of two kinds, the run speculated, or its profile is not
            there.
    """
    run = Run(**{name: row[name] for name in _RUN_FIELDS if name in row})
    if run.drafts:
        raise ConfigError("the simulator has no speculative decoding: leave out runs with --drafts")
    found, plain = (
        metrics(simulate(run, row["shape"], row["profile"], row["calibration"], overlap=overlap))
        for overlap in (True, False)
    )
    return [
        {
            "row": "comparison",
            "shape": row["shape"],
            **asdict(run),
            "metric": metric,
            "emulated": row[metric],
            "simulated": round(value, 3),
            "error": round(value / row[metric] - 1, 4),
            "simulated_without_overlap": round(plain[metric] or 0.0, 3),
            "emulated_commit": row["commit"],
        }
        for metric, value in found.items()
        if value is not None and row[metric] is not None
    ]


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


def metrics(turns: Sequence[TurnRow]) -> dict[str, float | None]:
    """Return the medians that a run's row has, too."""
    fine = [turn for turn in turns if not turn.failed]
    return {
        "t1_ttft_p50_ms": median([turn.ttft_ms for turn in fine if turn.turn == 1]),
        "t2_ttft_p50_ms": median([turn.ttft_ms for turn in fine if turn.turn > 1]),
        "tpot_p50_ms": median([turn.tpot_ms for turn in fine if turn.output_tokens > 1]),
    }
