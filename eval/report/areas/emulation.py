"""The emulation: its profiles, turns against their predictions, and what slow motion leaves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

from ...profiles.files import known
from ...profiles.profile import Extend, Step, load_profile
from ..parts import Block, Table, block, short
from ..results import Results

_CHECK = "emulation-check.jsonl"
_COMPARED = "emulation-simulator.jsonl"
METRICS = {
    "t1_ttft_p50_ms": "TTFT of first turns",
    "t2_ttft_p50_ms": "TTFT of later turns",
    "tpot_p50_ms": "TPOT",
}
_STEPS = (
    Step((Extend(200, 8192),)),
    Step((Extend(8192, 0),)),
    Step((), 1, 8192),
    Step((), 64, 64 * 8192),
)


def profiles(results: Results) -> Block:
    """Return the profiles of the package: a few steps, sizes, the error of interpolation."""
    table = []
    for name in known():
        profile = load_profile(name)
        error = profile.file.interpolation
        table.append(
            (
                f"`{name}`",
                *(f"{profile.step_ms(step):.1f}" for step in _STEPS),
                f"{profile.kv_bytes_per_token:,}",
                f"{profile.kv_pool_tokens:,}",
                f"{error.median_error:.1%}, {error.max_error:.1%}",
            )
        )
    head = ("profile", "200 new after 8k", "8k prompt", "decode of 1 at 8k", "of 64 at 8k")
    caption = "milliseconds of a step on the device; error: of interpolation, median and largest"
    sizes = ("KV bytes a token", "tokens of KV", "error")
    return Block(Table((*head, *sizes), table, caption).markdown(), ())


def check(results: Results) -> Block:
    """Return each cell's prediction and median, with its error."""
    rows = results.rows(_CHECK)
    turns, predictions = rows.where(row="turn"), rows.where(row="prediction")
    table = []
    for prediction in predictions:
        own = turns.where(cell=prediction["cell"])
        measured = statistics.median(own.values("measured_ms"))
        found = ", ".join(sorted({f"{value:,}" for value in own.values("cached_tokens")}))
        table.append(
            (
                prediction["cell"],
                f"{prediction['predicted_ms']:.1f}",
                f"{measured:.1f}",
                f"{100 * (measured / prediction['predicted_ms'] - 1):+.1f} %",
                f"{min(own.values('measured_ms')):.1f} to {max(own.values('measured_ms')):.1f}",
                found,
                f"{prediction['kv_bytes'] / 1e6:,.1f}",
                prediction["route"],
                f"{prediction['slow_motion']:g}",
            )
        )
    repeats = len(set(turns.values("repeat")))
    shares = max(turns.values("bubble_share"))
    caption = (
        f"TTFT in ms, medians of {repeats} repeats; "
        f"`{turns.rows[0]['profile']}`, calibration `{turns.rows[0]['calibration']}`; "
        f"idle with work queued: {100 * shares:.2f} % of the time in the worst turn"
    )
    head = ("turn", "predicted", "measured", "error", "lowest to highest", "cached tokens")
    return block(Table((*head, "KV, MB", "route", "k"), table, caption), made_of=[turns])


def rest(results: Results) -> Block:
    """Return what turns take beyond their prediction without slow motion."""
    rows = results.rows(_CHECK).where(row="rest")
    table = [
        (row["way"], f"{row['rest_ms']:.1f}", f"{min(row['repeats']):.1f} to "
         f"{max(row['repeats']):.1f}") for row in rows
    ]  # fmt: skip
    head = ("turn", "beyond its prediction, ms", "lowest to highest")
    return block(Table(head, table), made_of=[rows])


def simulator(results: Results) -> Block:
    """Return emulated runs beside their simulation."""
    rows = results.rows(_COMPARED)
    letters = dict(zip(dict.fromkeys(rows.values("workload")), ascii_uppercase, strict=False))
    table = [
        (
            f"`{row['profile']}`",
            f"{row['shape']}, {row['policy']}, {row['qps']:g}/s",
            f"{row['conversations']} of {letters[row['workload']]}",
            METRICS[row["metric"]],
            short(row["emulated"]),
            short(row["simulated"]),
            f"{100 * row['error']:+.1f} %",
            _interval(row),
            f"{100 * (row['simulated_without_overlap'] / row['emulated'] - 1):+.1f} %",
        )
        for row in rows
    ]
    workloads = ", ".join(f"{letter} `{name}`" for name, letter in letters.items())
    slow = ", ".join(f"{value:g}" for value in dict.fromkeys(rows.values("slow_motion")))
    caption = (
        f"conversations: {workloads}; slow motion {slow}; emulated with real workers, simulated "
        "without; interval: 95 %, bootstrap over conversations"
    )
    head: tuple[str, ...] = ("profile", "run", "conversations", "p50, ms")
    emulated = results.rows("emulation-clusters.jsonl").where(row="run")
    head += ("emulated", "simulated", "error", "interval", "without overlap")
    return block(Table(head, table, caption), made_of=[rows, emulated])


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row["error_interval"]
    return f"{100 * low:+.0f} to {100 * high:+.0f} %"


BLOCKS: dict[str, Callable[[Results], Block]] = {
    "profiles": profiles,
    "emulation-check": check,
    "emulation-rest": rest,
    "emulation-simulator": simulator,
}
