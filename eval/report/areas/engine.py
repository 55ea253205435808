"""The engine: what a later turn costs by route, alone, beside decodes and under load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...engine import interference as interference_rows
from ...summary import percentile
from ..parts import Block, Table, block, short, spread
from ..ratios import HOW, compared, paired
from ..results import Results, Row, Rows

_FILE = "bench-engine.jsonl"
_WAYS = ("full", "delta", "local")
_DECODES = 6


def _cells(results: Results, target_ms: float | None = None) -> Rows:
    return results.rows(_FILE).where(part="cells", target_ms=target_ms).newest()


def _p90(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.9)


def _size(key: Sequence[int]) -> tuple[str, str]:
    context, new = key[:2]
    return f"{context:,}", f"{new:,}"


def _sizes(rows: Rows) -> list[tuple[int, int]]:
    return sorted((context, new) for context, new in rows.groups("context", "new"))


def _ttft(rows: Sequence[Row]) -> str:
    return spread([row["ttft_ms"] for row in rows])


def ttft(results: Results) -> Block:
    """Return TTFT by route: with nothing else on the decode worker, and beside decodes."""
    rows = _cells(results)
    groups = rows.groups("context", "new", "background", "way", "bounded")

    def of(size: tuple[int, int], background: int, way: str, bounds: Sequence[bool]) -> list[Row]:
        keys = [(*size, background, way, bounded) for bounded in bounds]
        return [row for key in keys if key in groups for row in groups[key]]

    idle, busy = [], []
    for size in _sizes(rows):
        if of(size, 0, "delta", (True, False)):
            cells = (_ttft(of(size, 0, way, (True, False))) for way in _WAYS)
            alone = rows.where(context=size[0], new=size[1], background=0)
            local, delta = (alone.where(way=way) for way in ("local", "delta"))
            ratios = paired(local, delta, "ttft_ms", "round", "bounded")
            idle.append((*_size(size), *cells, compared(ratios)))
        transfers = (_ttft(of(size, _DECODES, way, (True, False))) for way in _WAYS[:2])
        bounds = (_ttft(of(size, _DECODES, "local", (bounded,))) for bounded in (True, False))
        busy.append((*_size(size), *transfers, *bounds))
    rounds = len({row["round"] for row in rows})
    of_rounds = f"TTFT in ms, medians of {rounds} rounds (lowest to highest)"
    head = ("context", "new", "full transfer", "delta transfer")
    return block(
        Table(
            (*head, "local", "local / delta"),
            idle,
            f"nothing else decodes; {of_rounds}, with either worker; ratios by round: {HOW}",
        ),
        Table(
            (*head, "local, bounded chunks", "local, one chunk"),
            busy,
            f"beside {_DECODES} decodes; {of_rounds}",
        ),
        made_of=[rows],
    )


def decodes(results: Results) -> Block:
    """Return what running decodes bear: TPOT as a multiple of what it was before, longest gaps."""
    rows = _cells(results).pick(lambda row: row["background"] == _DECODES, "decodes beside it")
    table = []
    for size in _sizes(rows):
        of = rows.where(context=size[0], new=size[1])
        delta = of.where(way="delta")
        bounded, whole = (of.where(way="local", bounded=bound) for bound in (True, False))
        ratios = (spread(_ratios(side)) for side in (delta, bounded, whole))
        gaps = (spread(side.values("max_gap_ms")) for side in (bounded, whole))
        table.append((*_size(size), *ratios, *gaps))
    head: tuple[str, ...] = ("context", "new", "TPOT: delta", "bounded", "one chunk")
    head += ("longest gap, ms: bounded", "one chunk")
    caption = (
        f"TPOT of {_DECODES} decodes until the measured turn's first token, as a multiple of what "
        "it was just before; medians over rounds (lowest to highest)"
    )
    return block(Table(head, table, caption), made_of=[rows])


def _ratios(rows: Rows) -> list[float]:
    return [
        row["bg_tpot_ms"] / row["quiet_tpot_ms"]
        for row in rows
        if row["bg_tpot_ms"] and row["quiet_tpot_ms"]
    ]


def target(results: Results) -> Block:
    """Return what bounded chunks keep where a TPOT target is given."""
    every = results.rows(_FILE).where(part="cells")
    targets = sorted(set(every.values("target_ms")), reverse=True)
    table, used = [], []
    for target_ms in targets:
        rows = _cells(results, target_ms).where(background=_DECODES, bounded=True)
        used.append(rows)
        for size in _sizes(rows):
            of = rows.where(context=size[0], new=size[1])
            local, delta = (of.where(way=way) for way in ("local", "delta"))
            gaps = local.values("max_gap_ms")
            table.append(
                (
                    f"{target_ms:g}",
                    *_size(size),
                    _ttft(local.rows),
                    _ttft(delta.rows),
                    spread(local.values("bg_tpot_ms")),
                    spread(gaps),
                    f"{max(gaps) / target_ms:.1f}",
                )
            )
    head: tuple[str, ...] = ("target, ms", "context", "new", "TTFT local, ms", "TTFT delta, ms")
    head += ("TPOT of the decodes, ms", "longest gap, ms", "longest gap of all, targets")
    caption = f"{_DECODES} decodes beside a local append; medians over rounds (lowest to highest)"
    return block(Table(head, table, caption), made_of=used)


def loaded(results: Results) -> Block:
    """Return later turns under load, with delta transfer and local."""
    rows = results.rows(_FILE).where(part="loaded").newest()
    later = rows.pick(lambda row: row["turn"] > 1, "a later turn")
    table = []
    for (qps, way), of in sorted(later.groups("qps", "way").items()):
        fine = of.pick(lambda row: not row["error"], "no error")
        ttfts, tpots = (fine.values(metric) for metric in ("ttft_ms", "tpot_ms"))
        table.append(
            (
                f"{qps:g}",
                way,
                *(short(figure(ttfts)) for figure in (statistics.median, _p90)),
                *(short(figure(tpots)) for figure in (statistics.median, _p90)),
                f"{len(of) - len(fine)} of {len(of)}",
            )
        )
    head = ("conversations/s", "route", "TTFT p50, ms", "p90", "TPOT p50, ms", "p90", "failed")
    seeds = len(set(later.values("seed")))
    return block(Table(head, table, f"later turns of {seeds} seeds together"), made_of=[rows])


def plugin_cost(results: Results) -> Block:
    """Return TPOT of a worker with the plugin against workers without it, by run."""
    rows = results.rows("plugin-cost.jsonl")
    table = []
    for (commit,), run in reversed(list(rows.groups("commit").items())):
        of = {row["way"]: row["tpot_ms"] for row in run}
        plugin = of["plugin"]
        ratios = [
            compared([a / b for a, b in zip(plugin, of[way], strict=True)])
            for way in ("sglang_radix", "sglang")
        ]
        table.append((commit[:7], f"{len(plugin)}", spread(plugin), *ratios))
    head = ("commit", "rounds", "TPOT with the plugin, ms", "/ SGLang with its radix cache")
    caption = f"medians over rounds (lowest to highest); ratios by round: {HOW}"
    return block(Table((*head, "/ SGLang as it comes"), table, caption), made_of=[rows])


def interference(results: Results) -> Block:
    """Return TPOT of 16 running decodes while prefills run beside them, by context."""
    rows = results.rows("interference.jsonl").newest().where(batch=16)
    cells = {
        (cell["context"], cell["prefills"], cell["kind"]): cell
        for cell in interference_rows.summarize([dict(row) for row in rows])
    }
    table = []
    for context in sorted({key[0] for key in cells}):
        alone = cells[context, 0, "none"]
        arms = [(n, kind) for kind in ("append", "full") for n in (1, 4)]
        multiples = (short(cells[context, n, kind]["tpot_ratio"]) for n, kind in arms)
        rounds = len(set(rows.where(context=context).values("round")))
        table.append((f"{context:,}", f"{rounds}", short(alone["tpot_ms"]), *multiples))
    head = ("context", "rounds", "TPOT alone, ms", "1 append", "4 appends", "1 full prefill")
    caption = "16 decodes; TPOT meanwhile as a multiple of TPOT alone, medians over rounds"
    return block(Table((*head, "4 full prefills"), table, caption), made_of=[rows])


BLOCKS: dict[str, Callable[[Results], Block]] = {
    "engine-ttft": ttft,
    "engine-decodes": decodes,
    "engine-target": target,
    "engine-loaded": loaded,
    "plugin-cost": plugin_cost,
    "interference": interference,
}
