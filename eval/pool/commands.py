"""The commands of the vector-search pool.

numba and faiss are slow to import and optional: each command imports its work when it runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ppd.errors import ConfigError

from ..options import Commands, add_out

if TYPE_CHECKING:
    from .given import Sample


def add_bench(commands: Commands) -> None:
    """Declare ``bench pool``."""
    bench = commands.add_parser(
        "pool",
        help="vector search, ours and others'",
        description=(
            "Measure vector search with this pool and with other libraries at equal recall, "
            "bursts served in six ways, and a pool over HTTP. The last line is one JSON "
            "object."
        ),
    )
    _add_sentences(bench)
    _add_rounds(bench)
    bench.add_argument("--large", type=int, default=1_000_000, help="synthetic rows; 0: none")
    bench.add_argument(
        "--hdf5",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="compare the indexes on these sets of ann-benchmarks, and measure nothing else",
    )
    bench.add_argument("--indexes", nargs="*", default=[], help="names; default: all")
    bench.add_argument("--logs", type=Path, default=Path(".run"), help="folder for a pool's log")
    add_out(bench)
    bench.set_defaults(run=_bench)


def add_card(commands: Commands) -> None:
    """Declare ``bench card``."""
    card = commands.add_parser(
        "card",
        help="vector search on a GPU",
        description=(
            "Measure this pool's search on a GPU beside exact search and, where cuVS is "
            "installed, CAGRA: rates at equal recall, single searches, expansions a second. The "
            "last line is one JSON object."
        ),
    )
    card.add_argument("--count", type=int, default=1_000_000, help="synthetic rows")
    card.add_argument("--dimensions", type=int, default=384)
    card.add_argument("--queries", type=int, default=10_000)
    card.add_argument("--seeds", type=int, help="nodes at which a search may begin")
    card.add_argument("--rounds", type=int, default=5)
    card.add_argument("--threads", type=int, help="of the graph's builder; default: one a core")
    card.add_argument("--seed", type=int, default=0)
    add_out(card)
    card.set_defaults(run=_card)


def add_bursts(commands: Commands) -> None:
    """Declare ``pool bursts``."""
    bursts = commands.add_parser(
        "bursts",
        help="bursts of searches, measured",
        description=(
            "Measure bursts of searches in six ways, over the index of `bench pool`. The last "
            "line is one JSON object."
        ),
    )
    _add_sentences(bursts)
    _add_rounds(bursts)
    add_out(bursts)
    bursts.set_defaults(run=_bursts)


def _add_sentences(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the sentences."""
    parser.add_argument(
        "--sentences",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="text, or JSONL with messages; what they lack comes from Python docstrings",
    )
    parser.add_argument("--count", type=int, default=50_000, help="sentences; `bench`: 0 for none")
    parser.add_argument(
        "--shortest", type=int, help="number of the shortest sentences to embed; default: all"
    )
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--threads", type=int, help="default: one a core, two at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".run/minilm"),
        help="folder of the model and of embeddings",
    )


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--burst-s", type=float, default=10.0, help="duration of each run of bursts"
    )


def add_queueing(commands: Commands) -> None:
    """Declare ``pool queueing``."""
    queueing = commands.add_parser(
        "queueing",
        help="bursts of searches, in simulated time",
        description=(
            "Serve bursts of searches in six ways in simulated time, with all, half and none of "
            "the time that Python takes. The last line is one JSON object."
        ),
    )
    queueing.add_argument("--loads", type=float, nargs="+", default=[0.15, 0.2, 0.25, 0.3, 0.7])
    queueing.add_argument("--seeds", type=int, default=5, help="how many; the medians are printed")
    add_out(queueing)
    queueing.set_defaults(run=_queueing)


def add_control(commands: Commands) -> None:
    """Declare ``pool control``."""
    control = commands.add_parser(
        "control",
        help="the control loop while the load changes",
        description=(
            "Serve phases of much prefill, much decode and a full KV link, with the control loop "
            "and with fixed controls. The last line is one JSON object."
        ),
    )
    control.add_argument(
        "--measured",
        action="store_true",
        help="over the index of `bench pool`; default: in simulated time. The link is simulated",
    )
    _add_sentences(control)
    control.add_argument("--seeds", type=int, default=5, help="how many; the medians are printed")
    add_out(control)
    control.set_defaults(run=_control)


def add_soak(commands: Commands) -> None:
    """Declare ``soak pool``."""
    soak = commands.add_parser(
        "pool",
        help="searches without end, and nothing may be wrong",
        description=(
            "Search while rows come and go, indexes are swapped and a shard is killed. "
            "Nothing may be wrong. The last line is one JSON object."
        ),
    )
    soak.add_argument("--searches", type=int, default=10_000_000)
    soak.add_argument("--seed", type=int, default=0)
    soak.add_argument("--out", type=Path, help="append the raw row to this JSONL file")
    soak.add_argument("--logs", type=Path, default=Path(".run/pool-soak"))
    soak.set_defaults(run=_soak)


def _queueing(options: argparse.Namespace) -> int:
    from . import queueing_study

    return queueing_study.run(options.loads, options.seeds, options.out)


def _control(options: argparse.Namespace) -> int:
    from . import control_study

    if not options.measured:
        return control_study.simulate(options.seeds, options.out)
    sample, threads = _sample(options, least=1), _threads(options)
    return control_study.measure(sample, options.seeds, threads, options.out)


def _soak(options: argparse.Namespace) -> int:
    from . import soak

    return soak.run(options.searches, options.seed, options.out, options.logs)


def _bench(options: argparse.Namespace) -> int:
    from . import bench, rivals

    if unknown := set(options.indexes) - set(rivals.ALL):
        names = ", ".join(rivals.ALL)
        raise ConfigError(f"--indexes: there is no {', '.join(sorted(unknown))}; there are {names}")
    plan = bench.Plan(
        sample=_sample(options),
        large=options.large,
        hdf5=tuple(options.hdf5),
        indexes=tuple(options.indexes),
        rounds=options.rounds,
        burst_s=options.burst_s,
        threads=_threads(options),
        logs=options.logs,
    )
    return bench.run(plan, options.out)


def _card(options: argparse.Namespace) -> int:
    from . import card_study

    plan = card_study.Plan(
        count=options.count,
        dimensions=options.dimensions,
        queries=options.queries,
        seeds=options.seeds,
        rounds=options.rounds,
        seed=options.seed,
        threads=options.threads or len(os.sched_getaffinity(0)),
    )
    return card_study.run(plan, options.out)


def _bursts(options: argparse.Namespace) -> int:
    from . import burst_study

    sample, threads = _sample(options, least=1), _threads(options)
    return burst_study.run(sample, options.rounds, options.burst_s, threads, options.out)


def _sample(options: argparse.Namespace, least: int = 0) -> Sample:
    from .given import Sample

    if options.count < least:
        raise ConfigError(f"--count: {options.count} sentences; at least {least}")
    return Sample(
        files=tuple(options.sentences),
        count=options.count,
        shortest=options.shortest,
        queries=options.queries,
        seed=options.seed,
        cache=options.cache,
    )


def _threads(options: argparse.Namespace) -> int:
    return options.threads or min(2, len(os.sched_getaffinity(0)))
