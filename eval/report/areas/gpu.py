"""What was measured on a GPU: steps of a Llama beside a profile, and the pool's search."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ...pool.recall import RECALL, qps_at
from ...profiles.profile import Extend, Step, load_profile
from ..parts import Block, Table, block, spread
from ..results import Results, Row, Rows

_STEPS = "gpu-steps.jsonl"
_PROFILE = "llama-3.1-8b-h200-tp1"  # of the GPU that the rows name
_POOL = "gpu-pool.jsonl"
_INDEXES = {
    "ours_cuda": "ours, int8 and fp32",
    "ours_cuda_1x1": "the same, 1 warp for 64 kept nodes",
    "ours_cuda_4x1": "the same, 4 warps for 64",
    "ours_cuda_8x3": "the same, 8 warps for 64, 3 parts in flight",
    "cagra": "cuVS CAGRA, fp32",
    "cagra_fp16": "cuVS CAGRA, fp16",
    "exact_cuda": "exact, TF32",
}
_WIDTHS = (64, 128, 256)


def _step(row: Row) -> Step:
    extends = tuple(Extend(new, cached) for new, cached in row["extends"])
    return Step(extends, row["sequences"], row["context_tokens"])


def _by_step(rows: Rows) -> dict[Step, list[float]]:
    found: dict[Step, list[float]] = {}
    for row in rows:
        found.setdefault(_step(row), []).append(row["measured_ms"])
    return found


def _named(step: Step) -> str:
    parts = [f"{one.new_tokens:,} new after {one.cached_tokens:,}" for one in step.extends]
    if step.sequences:
        each = step.context_tokens // step.sequences
        parts.append(f"{step.sequences} decode{'s' * (step.sequences > 1)} at {each:,}")
    return ", ".join(parts)


def steps(results: Results) -> Block:
    """Return the steps of one kind beside the profile of the same GPU."""
    rows = results.rows(_STEPS)
    profile = load_profile(_PROFILE)
    table = []
    for step, measured in _by_step(rows).items():
        if step.extends and step.sequences:
            continue
        of_profile = profile.step_ms(step)
        ms = median(measured)
        table.append(
            (
                _named(step),
                f"{of_profile:.1f}",
                f"{ms:.1f}",
                f"{100 * (ms / of_profile - 1):+.0f} %",
                _attention(rows, step),
            )
        )
    caption = (
        f"milliseconds of a step, {rows.rows[0]['gpu']}; measured: medians of the runs, PyTorch "
        f"{rows.rows[0]['torch']}, random weights, CUDA graph; profile: `{_PROFILE}`, calibration "
        "`device`"
    )
    head = ("step", "profile", "measured", "error", "faster attention")
    return block(Table(head, table, caption), made_of=[rows])


def _attention(rows: Rows, step: Step) -> str:
    if any(one.cached_tokens for one in step.extends):
        return "flash"  # both ways have it there: cuDNN has no mask for it
    return ", ".join(sorted({row["attention"] for row in rows if _step(row) == step}))


def mixed(results: Results) -> Block:
    """Return how long a step of decodes takes with new tokens in it."""
    rows = results.rows(_STEPS)
    profile = load_profile(_PROFILE)
    found = _by_step(rows)
    beside: dict[tuple[int, int], dict[int, Step]] = {}
    for step in found:
        if step.extends and step.sequences:
            key = step.sequences, step.context_tokens
            beside.setdefault(key, {})[step.new_tokens] = step
    table = []
    for (sequences, context), of in beside.items():
        alone = Step((), sequences, context)
        cells = [_pair(found, alone, profile.step_ms(alone))]
        cells += [_pair(found, step, profile.step_ms(step)) for _, step in sorted(of.items())]
        table.append((f"{sequences} decodes at {context // sequences:,}", *cells))
    news = sorted({new for of in beside.values() for new in of})
    cached = {one.cached_tokens for of in beside.values() for s in of.values() for one in s.extends}
    caption = (
        f"milliseconds of a step, {rows.rows[0]['gpu']}: measured / profile; new tokens after "
        f"{', '.join(f'{value:,}' for value in cached)} cached ones in the step of the decodes"
    )
    head = ("decodes", "alone", *(f"{new:,} new" for new in news))
    return block(Table(head, table, caption), made_of=[rows])


def _pair(found: dict[Step, list[float]], step: Step, profile_ms: float) -> str:
    measured = f"{median(found[step]):.1f}" if step in found else "-"
    return f"{measured} / {profile_ms:.1f}"


def indexes(results: Results) -> Block:
    """Return the indexes on a GPU: recall and rate, and single searches."""
    rows = results.rows(_POOL).newest()
    curves = rows.where(what="curve")
    single = {row["index"]: row for row in rows.where(what="single")}
    built = {row["index"]: row["seconds"] for row in rows.where(what="build")}
    table = []
    for index, name in _INDEXES.items():
        mine = curves.where(index=index)
        cells = [name, _rate(mine)]
        for width in _WIDTHS:
            at = [row for row in mine if row["width"] == width]
            recall = median(row["recall"] for row in at) if at else None
            qps = f"{median(row['qps'] for row in at):,.0f}" if at else "-"
            cells.append("-" if recall is None else f"{recall:.3f}, {qps}")
        one = single[index]
        cells += [
            f"{one['p50_us']:,.0f} / {one['p99_us']:,.0f}",
            f"{built[index]:.0f}" if index in built else "-",
        ]
        table.append(tuple(cells))
    first = curves.rows[0]
    rounds = len(set(curves.values("round")))
    caption = (
        f"{first['n']:,} rows of {first['dimensions']} dimensions, {first['gpu']}, "
        f"{_versions(first)}; searches a second of 10,000 queries at once, medians of {rounds} "
        "rounds (lowest to highest); itopk: recall, searches a second; one query: at the least "
        f"itopk with recall {RECALL:g}, from host memory to host memory"
    )
    widths = (f"itopk {width}" for width in _WIDTHS)
    head = ("", f"recall {RECALL:g}", *widths, "one query, p50 / p99 us", "built in, s")
    return block(Table(head, table, caption), made_of=[rows])


def _rate(curves: Rows) -> str:
    rates = []
    for of in curves.groups("round").values():
        points = sorted((row["width"], row["recall"], row["qps"]) for row in of)
        if (rate := qps_at([(recall, qps) for _, recall, qps in points])) is not None:
            rates.append(rate)
    return spread(rates)


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def lanes(results: Results) -> Block:
    """Return how many expansions a second lanes do, and the memory that they read."""
    rows = results.rows(_POOL).newest()
    copy = median(rows.where(what="copy").rows[0]["gb_per_s"])
    rates = rows.where(what="rate")
    table = []
    for (count, width), of in rates.groups("lanes", "width").items():
        cells = []
        for row in of:
            per_s = median(rate for rate, _ in row["expansions_per_s"])
            gb_per_s = median(gb for _, gb in row["expansions_per_s"])
            cells.append(f"{per_s / 1e6:.1f} M, {gb_per_s:.0f} GB/s")
        table.append((f"{count:,}", f"{width}", *cells))
    few = min(rates.values("steps"))
    caption = (
        f"expansions a second until the last of the searches has its result, with the bytes of "
        f"rows and edges that they read; a copy in the GPU's memory: {copy:,.0f} GB/s, read and "
        "written"
    )
    head = ("lanes", "itopk", f"{few} expansions a launch", "one launch")
    return block(Table(head, table, caption), made_of=[rows])


BLOCKS: dict[str, Callable[[Results], Block]] = {
    "gpu-steps": steps,
    "gpu-mixed": mixed,
    "pool-gpu": indexes,
    "pool-gpu-lanes": lanes,
}
