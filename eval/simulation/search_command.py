"""``ppd-eval simulate search-placement``: where vector search should run, as a table and a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ppd.errors import ConfigError

from ..options import Commands, add_out
from ..provenance import provenance
from ..raw_rows import appending
from .cost_model import paper_model
from .search_placement import Architecture, Gpus, Index, Outcome, SearchCost, Traffic, outcome

INDEX = Index(rows=10e6, dimensions=768)


def shapes(gpus: int) -> dict[Architecture, Gpus]:
    """Half of the GPUs prefill; a pool has one that would decode otherwise."""
    half = gpus // 2
    return {
        Architecture.COUPLED: Gpus(half, gpus - half),
        Architecture.PREFILL: Gpus(half, gpus - half),
        Architecture.POOL: Gpus(half, gpus - half - 1, 1),
    }


def add_to(commands: Commands) -> None:
    """Declare ``simulate search-placement``."""
    parser = commands.add_parser(
        "search-placement", help="vector search on every GPU, on prefill's, or on its own"
    )
    parser.add_argument("--gpus", type=int, default=64, help="of the cluster; 3 or more")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[r / 8 for r in range(2, 81)],
        help="turns a second, for each GPU",
    )
    parser.add_argument("--rows", type=float, default=INDEX.rows, help="of the index")
    parser.add_argument("--dimensions", type=int, default=INDEX.dimensions)
    add_out(parser)
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status; the last line on stdout is one JSON object.

    Raises:
        ConfigError: an option makes no sense.
    """
    if options.gpus < 3 or min(options.rates) <= 0 or options.rows < 1 or options.dimensions < 1:
        raise ConfigError("--gpus must be 3 or more; rates, rows and dimensions above 0")
    costs, search = paper_model(), SearchCost()
    index = Index(options.rows, options.dimensions)
    found: dict[Architecture, dict[float, Outcome]] = {}
    with appending(options.out) as write:
        for where, gpus in shapes(options.gpus).items():
            found[where] = {}
            for rate in options.rates:
                traffic = Traffic(rate * options.gpus)
                one = outcome(where, gpus, traffic, costs, index, search)
                if one is not None:
                    found[where][rate] = one
                    row = {"where": where, "turns_per_s": traffic.turns_per_s, **asdict(one)}
                    write(provenance(0) | row | {"gpus": asdict(gpus)})
    _print(found, options.rates)
    told = {
        "searches_at_once_that_fill_a_gpu": round(search.saturation(index, costs.gpu), 1),
        "one_search_alone_uses": round(search.utilisation(1, index, costs.gpu), 4),
        "most_turns_per_s_a_gpu": {where: max(rows, default=0.0) for where, rows in found.items()},
        "kv_tokens": {where: _first(rows).kv_tokens for where, rows in found.items() if rows},
    }
    if options.plot is not None:
        _draw(found, search, index, options.plot)
    print(json.dumps(told))
    return 0


def _first(rows: dict[float, Outcome]) -> Outcome:
    return next(iter(rows.values()))


def _print(found: dict[Architecture, dict[float, Outcome]], rates: Sequence[float]) -> None:
    print(
        "| turns/s a GPU | where | TTFT, ms | TPOT, ms | prefill's search, ms | decode's | stall |"
    )
    print("|---|---|---|---|---|---|---|")
    for rate in rates[:: max(1, len(rates) // 6)]:
        for where, rows in found.items():
            if (one := rows.get(rate)) is None:
                print(f"| {rate:g} | {where} | too much | | | | |")
                continue
            print(
                f"| {rate:g} | {where} | {one.ttft_ms:.0f} | {one.tpot_ms:.1f} | "
                f"{one.prefill_search_ms:.1f} | {one.decode_search_ms:.1f} | {one.stall:.1%} |"
            )


def _draw(
    found: dict[Architecture, dict[float, Outcome]],
    search: SearchCost,
    index: Index,
    plot: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    costs = paper_model()
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    roofline = axes[0][0]
    at_once = [2.0**i for i in range(-5, 11)]
    used = [100 * search.utilisation(n, index, costs.gpu) for n in at_once]
    roofline.plot(at_once, used, color="black", linewidth=1.2)
    for where, rows in found.items():
        last = list(rows.values())[-1]
        full = search.saturation(index, costs.gpu)
        x = max(last.in_flight * full, at_once[0])
        roofline.plot([x], [100 * search.utilisation(x, index, costs.gpu)], "o", label=where)
    roofline.set_xscale("log", base=2)
    roofline.set_yscale("log")
    roofline.set_xlabel("searches at once on a GPU")
    roofline.set_ylabel("memory bandwidth used, %")
    roofline.set_title("a search fills no GPU; dots: at the highest rate", fontsize=9)
    shown = (
        (axes[0][1], "ttft_ms", 1.0, "TTFT, ms"),
        (axes[1][0], "decode_search_ms", 1.0, "decode's search, p95, ms"),
        (axes[1][1], "stall", 100.0, "streams wait for their searches, %"),
    )
    for axis, name, unit, label in shown:
        for where, rows in found.items():
            values = [unit * getattr(one, name) for one in rows.values()]
            axis.plot(list(rows), values, label=where, linewidth=1.4)
        axis.set_xlabel("turns a second, for each GPU")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0][1].legend(fontsize=8)
    roofline.legend(fontsize=8)
    figure.savefig(plot, dpi=110)
    pyplot.close(figure)
