"""``ppd-eval simulate search-placement``: where vector search should run, by a profile's times."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ppd.errors import ConfigError

from ..options import Commands, add_out
from ..profiles.profile import Profile, load_profile
from ..provenance import provenance
from ..raw_rows import append_whole
from .searches import Architecture, Index, Measured, SearchCost, SearchSimulation, Turns, Workers

# Peak bandwidth of a GPU's memory, by data sheet.
_MEMORY_BYTES_PER_S = {"H100 SXM": 3.35e12, "H200 SXM": 4.8e12, "L40S": 0.864e12}
_KEEPS_UP = 1.25  # a run may end so many times as late as its last arrival, and a reply later
_REPLY_S = 5.0


def add_to(commands: Commands) -> None:
    """Declare ``simulate search-placement``."""
    parser = commands.add_parser(
        "search-placement",
        help="vector searches on every GPU, on the prefill GPUs, or in a pool",
        description=(
            "Simulate turns that search, with the index on every GPU, on the prefill GPUs, or on "
            "GPUs that only search. The last line is one JSON object."
        ),
    )
    parser.add_argument("--profile", required=True, help="of 'profile list'")
    parser.add_argument("--calibration", default="device", help="of the profile")
    parser.add_argument("--link-gbps", type=float, default=100.0)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[8, 32], help="workers of a cluster, even numbers"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 2, 4, 6, 8, 10, 12], help="turns/s a worker"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of arrivals")
    parser.add_argument("--rows", type=float, default=10e6, help="rows of the index")
    parser.add_argument("--dimensions", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each cluster and rate, and one JSON line.

    Raises:
        ConfigError: an option or the profile is wrong.
        OutsideProfileError: a step lies beyond twice the range of the profile.
    """
    if any(count < 4 or count % 2 for count in options.workers):
        raise ConfigError("--workers must be even numbers from 4 on")
    positive = (*options.rates, options.seconds, options.rows, options.dimensions)
    if not (min(positive) > 0 and options.link_gbps > 0):
        raise ConfigError("rates, seconds, rows, dimensions and --link-gbps must be above 0")
    profile = load_profile(options.profile, options.calibration)
    index = Index(rows=options.rows, dimensions=options.dimensions)
    about = {
        **profile.provenance(),
        "link_gbps": options.link_gbps,
        "index": asdict(index),
        "search": asdict(SearchCost()),
    }
    found = []
    for count in options.workers:
        for where in Architecture:
            for rate in options.rates:
                row = _row(where, count, rate, profile, index, options)
                if row is None:
                    break  # higher rates are no better
                found.append(row)
                _print(row)
    rows = [{"row": "searches", **row, **about, **provenance(options.seed)} for row in found]
    if options.out is not None:
        append_whole(options.out, rows)
    print(json.dumps({"rows": found, **about, **provenance(options.seed)}))
    return 0


def workers_of(where: Architecture, count: int) -> Workers:
    """Return half of the workers as prefill workers; a pool takes the place of a decode worker."""
    half = count // 2
    pool = int(where is Architecture.POOL)
    return Workers(half, half - pool, pool)


def _row(
    where: Architecture,
    count: int,
    rate: float,
    profile: Profile,
    index: Index,
    options: argparse.Namespace,
) -> dict[str, object] | None:
    """Simulate one cluster at one rate; None if it does not keep up."""
    gpu = profile.file.gpu
    if gpu not in _MEMORY_BYTES_PER_S:
        known = ", ".join(_MEMORY_BYTES_PER_S)
        raise ConfigError(
            f"profile {options.profile}: the bandwidth of {gpu} is not known: {known}"
        )
    turns = Turns(rate * count, options.seconds)
    workers = workers_of(where, count)
    measured = SearchSimulation(
        where,
        workers,
        turns,
        profile,
        options.link_gbps,
        _MEMORY_BYTES_PER_S[gpu] * profile.file.tensor_parallel,
        index=index,
        cost=SearchCost(),
    ).run(options.seed)
    if not measured.tpot_ms or measured.ended_s > _KEEPS_UP * turns.seconds + _REPLY_S:
        return None
    return {
        "where": where.value,
        "workers": asdict(workers),
        "per_s_a_worker": rate,
        "turns": asdict(turns),
        "served": len(measured.tpot_ms),
        "kv_tokens": measured.kv_tokens,
        **_quantiles(measured),
    }


def _quantiles(measured: Measured) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in ("ttft_ms", "tpot_ms", "prefill_search_ms", "decode_search_ms"):
        ordered = sorted(getattr(measured, name))
        for percent in (50, 90, 99):
            value = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
            found[name.replace("_ms", f"_p{percent}_ms")] = round(value, 3)
    return found


def _print(row: dict[str, object]) -> None:
    print(
        f"{row['where']:8} {row['workers']}  {row['per_s_a_worker']:4g}/s a worker  "
        f"TTFT p50 {row['ttft_p50_ms']} p99 {row['ttft_p99_ms']}  "
        f"TPOT p50 {row['tpot_p50_ms']}  searches p50 {row['prefill_search_p50_ms']} prefill, "
        f"{row['decode_search_p50_ms']} decode",
        flush=True,
    )
