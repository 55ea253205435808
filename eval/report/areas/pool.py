"""The vector-search pool: indexes at the same recall, widths, HTTP, the soak test."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ppd.errors import ConfigError

from ...pool.recall import RECALL, qps_at
from ..parts import Block, Table, block, short, spread
from ..ratios import HOW, compared
from ..results import Results, Rows

_FILE = "bench-pool.jsonl"
_NAMES = {
    "ours_fp32": "ours, fp32 only",
    "hnswlib": "hnswlib",
    "hnswlib_16_400": "hnswlib, efConstruction 400",
    "hnswlib_32_200": "hnswlib, M 32",
    "hnswlib_32_400": "hnswlib, M 32, efConstruction 400",
    "faiss_hnsw": "faiss HNSW",
    "faiss_nsg": "faiss NSG",
    "usearch": "usearch, f32",
    "svs": "SVS",
    "ours": "ours, int8 and fp32",
    "faiss_hnsw_sq": "faiss HNSW, 8 bits and fp32",
    "faiss_hnsw_sq_16_400": "the same, efConstruction 400",
    "faiss_hnsw_sq_32_200": "the same, M 32",
    "faiss_hnsw_sq_32_400": "the same, M 32, efConstruction 400",
    "usearch_i8": "usearch, i8 and fp32",
    "svs_i8": "SVS, int8 and fp32",
    "usearch_f16": "usearch, f16",
}
_SMALL = ("faiss_hnsw_sq", "usearch_i8", "svs_i8")  # begin the names of rivals of a byte or so
_FP32 = ("hnswlib", "faiss_hnsw", "faiss_nsg", "usearch", "svs")
_OURS = ("ours_fp32", "ours")
_RECALLS = (0.9, RECALL, 0.98)
_WIDTHS = {"small": (10, 16, 32), "large": (16, 32, 64)}


def _rows(results: Results, what: str, of_set: str) -> Rows:
    return results.rows(_FILE).where(what=what, set=of_set).newest()


def _rates(curves: Rows, index: str, threads: int, recall: float = RECALL) -> dict[int, float]:
    """Return searches a second at a recall, by round."""
    found = {}
    mine = [row for row in curves if (row["index"], row["threads"]) == (index, threads)]
    for number in sorted({row["round"] for row in mine}):
        points = sorted(
            (row["width"], row["recall"], row["qps"]) for row in mine if row["round"] == number
        )
        qps = qps_at([(recall, qps) for _, recall, qps in points], recall)
        if qps is not None:
            found[number] = qps
    return found


def _rate(curves: Rows, index: str, threads: int, recall: float) -> str:
    """Return the searches a second as a cell; the highest recall where that is too low."""
    if rates := _rates(curves, index, threads, recall):
        return spread(list(rates.values()))
    highest = max(curves.where(index=index, threads=threads).values("recall"), default=None)
    return "-" if highest is None else f"recall {highest:.2f} at most"


def _against(curves: Rows, ours: str, other: str, threads: int = 1) -> list[float]:
    mine, base = (_rates(curves, name, threads) for name in (ours, other))
    return [mine[number] / base[number] for number in mine if number in base]


def _ours_for(index: str) -> str | None:
    """Return ours that an index is compared with: that with rows of as many bytes."""
    if index.startswith(_SMALL):
        return "ours"
    return "ours_fp32" if index.startswith(_FP32) and index != "usearch_f16" else None


def _best(curves: Rows, ours: str) -> str | None:
    """Return the fastest rival of one of ours, on one thread; None: none was measured."""
    rates = {
        index: median(rates.values())
        for index in set(curves.values("index"))
        if _ours_for(index) == ours and (rates := _rates(curves, index, 1))
    }
    return max(rates, key=rates.__getitem__) if rates else None


def _indexes(results: Results, of_set: str) -> Block:
    curves = _rows(results, "curve", of_set)
    alone = {row["index"]: row for row in _rows(results, "single", of_set)}
    built = {row["index"]: row["seconds"] for row in _rows(results, "build", of_set)}
    names = [name for name in _NAMES if name in curves.values("index")]
    rows, rounds = curves.rows[0]["n"], len(set(curves.values("round")))
    tables = []
    for threads in sorted(set(curves.values("threads"))):
        table = []
        for index in names:
            rates = [_rate(curves, index, threads, of) for of in _RECALLS]
            mine, query = _ours_for(index), alone.get(index)
            ratio = compared(_against(curves, mine, index, threads)) if mine else "-"
            cells = [_NAMES[index], *rates, ratio]
            if threads == 1:
                one = f"{query['p50_us']:,.0f} / {query['p99_us']:,.0f}" if query else "-"
                # Two of ours have one graph, which is built once.
                cells += [one, f"{built[index]:.0f}" if built[index] >= 1 else "-"]
            table.append(tuple(cells))
        head = ["", *(f"recall {of:g}" for of in _RECALLS), "ours / it"]
        if threads == 1:
            head += ["one query, p50 / p99 us", "built in, s"]
        caption = (
            f"{rows:,} rows, searches a second on {threads} thread{'s' if threads > 1 else ''}; "
            f"medians of {rounds} rounds (lowest to highest); ours / it: rows of as many bytes, at "
            f"recall {RECALL:g}, by round: {HOW}"
        )
        tables.append(Table(tuple(head), table, caption))
    return block(*tables, made_of=[curves])


def small(results: Results) -> Block:
    """Return all indexes on the sentences."""
    return _indexes(results, "small")


def large(results: Results) -> Block:
    """Return all indexes on the made rows."""
    return _indexes(results, "large")


def _curves_by_commit(results: Results) -> list[tuple[str, Rows]]:
    """Return the commit and the curves of every run, of each collection the newest first."""
    curves = results.rows(_FILE).where(what="curve")
    return [
        (commit, rows)
        for of_set in ("small", "large")
        for (commit,), rows in reversed(curves.where(set=of_set).groups("commit").items())
    ]


def runs(results: Results) -> Block:
    """Return ours against the best rivals in every run that is in the file."""
    table = []
    found = _curves_by_commit(results)
    for commit, rows in found:
        cells: list[str] = []
        for ours in _OURS:
            rival = _best(rows, ours)
            cells += (_NAMES[rival], compared(_against(rows, ours, rival))) if rival else ("-", "-")
        table.append((f"{rows.rows[0]['n']:,}", commit[:7], *cells))
    head = ("rows", "commit", "best of fp32", "ours / it", "best of a byte", "ours / it")
    caption = f"searches a second at recall {RECALL:g}, one thread; ratios by round: {HOW}"
    return block(Table(head, table, caption), made_of=[rows for _, rows in found])


def summary(results: Results) -> Block:
    """Return ours against the best rival with rows of as many bytes, in the newest runs."""
    table, used = [], []
    for of_set in ("small", "large"):
        curves = _rows(results, "curve", of_set)
        used.append(curves)
        n = f"{curves.rows[0]['n']:,}"
        for ours in _OURS:
            rate = spread(list(_rates(curves, ours, 1).values()))
            rival = _best(curves, ours)
            if rival is None:
                table.append((n, _NAMES[ours], rate, "not measured", "-", "-"))
                continue
            its = spread(list(_rates(curves, rival, 1).values()))
            ratio = compared(_against(curves, ours, rival))
            table.append((n, _NAMES[ours], rate, _NAMES[rival], its, ratio))
    head = ("rows", "", "searches/s", "best rival", "its searches/s", "ours / it")
    caption = (
        f"recall {RECALL:g}, one thread; medians over rounds (lowest to highest); ratios by round: "
        f"{HOW}"
    )
    return block(Table(head, table, caption), made_of=used)


def widths(results: Results) -> Block:
    """Return what a search costs by the nodes that it keeps, on one core."""
    table, used = [], []
    for of_set, some in _WIDTHS.items():
        curves = _rows(results, "curve", of_set).where(index="ours", threads=1)
        used.append(curves)
        for width in some:
            of = curves.where(width=width)
            recall = f"{median(of.values('recall')):.2f}"
            table.append((f"{of.rows[0]['n']:,}", f"{width}", spread(of.values("qps")), recall))
    head = ("rows", "itopk", "searches/s of one core", "recall")
    caption = "int8 rows, measured again in fp32; medians over rounds (lowest to highest)"
    return block(Table(head, table, caption), made_of=used)


def over_http(results: Results) -> Block:
    """Return what a pool does over HTTP, and what it takes to start and to rebuild."""
    rates, start, rebuild = (_rows(results, what, "small") for what in ("http", "start", "rebuild"))
    table = [
        (f"searches/s: {form}", spread(rows.values("qps")))
        for (form,), rows in rates.groups("form").items()
    ]
    ready, made = start.rows[-1], rebuild.rows[-1]
    table += [
        ("ready after, s", short(ready["ready_s"])),
        ("memory when ready, MB", short(ready["mb"])),
        ("rebuild, s", short(made["seconds"])),
        ("memory during a rebuild, at most, MB", short(made["most_mb"])),
    ]
    caption = f"{ready['n']:,} rows; medians over rounds (lowest to highest)"
    return block(Table(("", ""), table, caption), made_of=[rates])


def soak(results: Results) -> Block:
    """Return what the soak test did, and what was missing at its end."""
    rows = results.rows("pool-soak.jsonl").newest()
    row = rows.rows[-1]
    memory: Sequence[float] = row["memory_mb"]
    if not memory:
        raise ConfigError(f"{rows.file}: the soak test has no memory marks")
    table = [
        ("searches", f"{row['searches']:,}"),
        ("minutes", f"{row['seconds'] / 60:.0f}"),
        ("rows added, deleted", f"{row['added']:,}, {row['deleted']:,}"),
        ("kills of a shard", f"{row['kills']}"),
        ("rebuilds by request, of them cut by a kill", f"{row['swaps']}, {row['swaps_cut']}"),
        ("rows searched for by themselves", f"{row['sought']:,}"),
        ("of them not found", f"{row['missed']:,} (recall {row['recall']:.4f})"),
        ("filtered searches", f"{row['filtered']:,}"),
        ("answers of the front, of them partial", f"{row['front']:,}, {row['partial']:,}"),
        ("memory of the shard that was not killed, MB", f"{min(memory):.0f} to {max(memory):.0f}"),
    ]
    return block(Table(("", ""), table), made_of=[rows])


BLOCKS = {
    "pool-small": small,
    "pool-large": large,
    "pool-runs": runs,
    "pool-summary": summary,
    "pool-widths": widths,
    "pool-http": over_http,
    "pool-soak": soak,
}
