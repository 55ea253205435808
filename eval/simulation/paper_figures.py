"""``ppd-eval simulate figures``: Figures 1, 5, 6 and 10 of the PPD paper, by their texts.

Numbers and settings are those of v2, as its readers quote them. The paper's traffic is not here, so
lengths follow what it states of it. What it leaves open is read in two ways, or assumed:

- Figure 1: 10k tokens in, 100 out, 5 turns. They are of the first turn, or of each one.
- Figure 5: WildChat, 4.1 turns in the mean, a context of about 2,200 tokens, one conversation a
  second. Here all have 4 turns and replies of 330. A slower link delays a transfer by what it takes
  longer than NVLink at 150 GB/s, as the paper's injection does.
- Figure 6: a prefill-heavy slice. Here 4 turns add 1,024 tokens each, with replies of 64.
- In these three the clients send replies back as other tokens, as in the paper's grid.
- Figure 10: 2 to 16 turns, models of three sizes. Here by profiles, with 200 tokens a turn.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean

from msgspec import structs

from ppd.policies import static_policy

from ..options import Commands, add_out
from ..profiles.profile import load_profile
from ..provenance import provenance
from ..raw_rows import append_whole
from ..summary import percentile
from .cost_model import CostModel, Costs, paper_model
from .paper_grid import CONFIGURATIONS
from .profile_costs import ProfileCosts
from .simulator import Simulation
from .traffic import Clients, TurnTokens, Workload, poisson
from .workers import Shape

_NVLINK_BYTES_PER_S = 150e9
LINKS = (150.0, 50.0, 25.0, 10.0)  # GB/s: NVLink, InfiniBand NDR and HDR, 100 Gb Ethernet
SHARES = (0.0, 0.2, 0.5, 0.95)  # local, at the weights of TPOT infinity, 6, 3 and 1
FIGURE_10_GBPS = 100.0  # links of its profiles
PROFILES = ("llama-3.1-8b-h100-tp1", "qwen3-32b-h100-tp2", "deepseek-v3-h200-tp8")
_CONVERSATIONS = 500


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One point of a figure.

    Attributes:
        reading: of what the paper leaves open.
        axis: the value on its axis: link in GB/s, local share, or turns of a conversation.
        t2_ttft_ms: mean of later turns; and so the others of them.
        ttft_p99_ms: of all turns.
        turn_ms: a later turn from its arrival to its end, mean.
    """

    figure: str
    reading: str
    configuration: str
    policy: str
    qps: float
    axis: float
    turns: int
    t2_ttft_ms: float
    t2_tpot_ms: float
    ttft_p99_ms: float
    turn_ms: float
    tokens_per_s: float


def add_to(commands: Commands) -> None:
    """Declare ``simulate figures``."""
    parser = commands.add_parser(
        "figures",
        help="Figures 1, 5, 6 and 10 of the PPD paper",
        description=(
            "Simulate Figures 1, 5, 6 and 10 of the PPD paper. The last line is one JSON object."
        ),
    )
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each point, and one JSON line.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = []
    for row in figures(options.seed):
        rows.append({"row": "figure", **asdict(row), **provenance(options.seed)})
        print(json.dumps(asdict(row)), flush=True)
    if options.out is not None:
        append_whole(options.out, rows)
    print(json.dumps({"points": len(rows), **provenance(options.seed)}))
    return 0


def figures(seed: int) -> Iterator[FigureRow]:
    """Iterate over the points of all figures."""
    costs = paper_model()
    for reading, workload in (
        ("once", _turns(5, 10240, 100, 128)),
        ("each", _turns(5, 10240, 100)),
    ):
        for qps, configuration in product((0.5, 1.0, 1.5), CONFIGURATIONS):
            yield _point("1", costs, configuration, workload, qps, 60.0, seed, reading=reading)
    chats = _turns(4, 1200, 330, 250)
    for link, configuration in product(LINKS, ("1P_3D", "1P_3pD")):
        slowed = _with_link(costs, 1e9 * link)
        yield _point("5", slowed, configuration, chats, 1.0, _CONVERSATIONS, seed, axis=link)
    pastes = _turns(4, 1024, 64)
    for qps, share in product((8.0, 16.0), SHARES):
        policy, duration_s = f"partial:{share:g}", _CONVERSATIONS / qps
        yield _point("6", costs, "1P_3pD", pastes, qps, duration_s, seed, policy=policy, axis=share)
    for name, turns, configuration in product(PROFILES, (2, 4, 8, 16), ("1P_3D", "1P_3pD")):
        of_profile = ProfileCosts(load_profile(name), link_gbps=FIGURE_10_GBPS)
        workload = structs.replace(_turns(turns, 2000, 200, 200), think_s=2.0)
        yield _point(
            "10", of_profile, configuration, workload, 0.5, 240.0, seed, reading=name, axis=turns
        )


def _turns(count: int, first: int, reply: int, later: int | None = None) -> Workload:
    more = (TurnTokens(first if later is None else later, reply),) * (count - 1)
    return Workload(f"{count} turns", (TurnTokens(first, reply), *more), ())


def _with_link(costs: CostModel, bytes_per_s: float) -> CostModel:
    """The costs with a transfer that takes so much longer than over NVLink."""
    fitted = 1 / costs.serving.link_bytes_per_s
    more = 1 / bytes_per_s - 1 / _NVLINK_BYTES_PER_S
    serving = replace(costs.serving, link_bytes_per_s=1 / (fitted + more))
    return CostModel(costs.model, costs.gpu, serving)


def _point(
    figure: str,
    costs: Costs,
    configuration: str,
    workload: Workload,
    qps: float,
    duration_s: float,
    seed: int,
    *,
    reading: str = "",
    policy: str = "",
    axis: float = 0.0,
) -> FigureRow:
    shape = Shape.parse(configuration)
    policy = policy or ("replica" if shape.replica == shape.workers else "full")
    clients = Clients(replies_lost=figure != "10")
    simulation = Simulation(costs, shape, static_policy(policy), clients, seed)
    source = random.Random(f"{workload.name}/{qps}/{seed}")
    result = simulation.run(poisson(workload, qps, duration_s, source))
    later = [row for row in result.rows if row.turn > 1]
    return FigureRow(
        figure=figure,
        reading=reading,
        configuration=configuration,
        policy=policy,
        qps=qps,
        axis=axis,
        turns=len(result.rows),
        t2_ttft_ms=round(fmean(row.ttft_ms for row in later), 3),
        t2_tpot_ms=round(fmean(row.tpot_ms for row in later), 4),
        ttft_p99_ms=round(percentile(sorted(row.ttft_ms for row in result.rows), 0.99), 3),
        turn_ms=round(fmean(row.e2e_ms for row in later), 3),
        tokens_per_s=round(sum(row.output_tokens for row in result.rows) / result.ended_s, 3),
    )
