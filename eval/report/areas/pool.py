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
    "ours": "ours, int8 and fp32",
    "ours_fp32": "ours, fp32 only",
    "hnswlib": "hnswlib",
    "faiss_hnsw": "faiss HNSW",
    "faiss_nsg": "faiss NSG",
    "usearch_f16": "usearch, f16",
    "usearch": "usearch, f32",
}
_RIVAL = "hnswlib"
_WIDTHS = {"small": (10, 16, 32), "large": (64, 128, 256)}


def _rows(results: Results, what: str, of_set: str) -> Rows:
    return results.rows(_FILE).where(what=what, set=of_set).newest()


def _rates(curves: Rows, index: str, threads: int) -> dict[int, float]:
    """Return searches a second at the recall of the comparison, by round."""
    found = {}
    for (number,), rows in curves.where(index=index, threads=threads).groups("round").items():
        points = sorted((row["width"], row["recall"], row["qps"]) for row in rows)
        qps = qps_at([(recall, qps) for _, recall, qps in points])
        if qps is not None:
            found[number] = qps
    return found


def _against(curves: Rows, index: str) -> list[float]:
    mine, base = _rates(curves, index, 1), _rates(curves, _RIVAL, 1)
    return [mine[number] / base[number] for number in mine if number in base]


def _indexes(results: Results, of_set: str) -> Block:
    curves = _rows(results, "curve", of_set)
    alone = {row["index"]: row for row in _rows(results, "single", of_set)}
    built = {row["index"]: row["seconds"] for row in _rows(results, "build", of_set)}
    threads = max(curves.values("threads"))
    table = []
    for index in (name for name in _NAMES if name in curves.values("index")):
        one, several = (list(_rates(curves, index, n).values()) for n in (1, threads))
        query = alone.get(index)
        highest = max(curves.where(index=index).values("recall"))
        table.append(
            (
                _NAMES[index],
                spread(one) if one else f"recall {highest:.2f} at most",
                "1" if index == _RIVAL else compared(_against(curves, index)),
                spread(several),
                "-" if query is None else f"{query['p50_us']:,.0f} / {query['p99_us']:,.0f}",
                f"{built[index]:.0f}" if built[index] >= 1 else "-",  # it takes the other's graph
            )
        )
    rows, rounds = curves.rows[0]["n"], len(set(curves.values("round")))
    head = ("", "searches/s, 1 thread", "/ hnswlib", f"{threads} threads")
    caption = (
        f"{rows:,} rows, recall {RECALL:g}; medians of {rounds} rounds (lowest to highest); "
        f"ratios by round: {HOW}"
    )
    return block(
        Table((*head, "one query, p50 / p99 us", "built in, s"), table, caption), made_of=[curves]
    )


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
    """Return ours against hnswlib in every run that is in the file."""
    table = []
    found = _curves_by_commit(results)
    for commit, rows in found:
        ratios = (compared(_against(rows, index)) for index in ("ours", "ours_fp32"))
        table.append((f"{rows.rows[0]['n']:,}", commit[:7], *ratios))
    head = ("rows", "commit", "ours, int8 and fp32 / hnswlib", "ours, fp32 only / hnswlib")
    caption = f"searches a second at recall {RECALL:g}, one thread; ratios by round: {HOW}"
    return block(Table(head, table, caption), made_of=[rows for _, rows in found])


def summary(results: Results) -> Block:
    """Return ours against hnswlib in the newest run of each collection."""
    table, used = [], []
    for of_set in ("small", "large"):
        curves = _rows(results, "curve", of_set)
        used.append(curves)
        for index in ("ours", "ours_fp32"):
            rate, base = (list(_rates(curves, name, 1).values()) for name in (index, _RIVAL))
            ratio = compared(_against(curves, index))
            n = f"{curves.rows[0]['n']:,}"
            table.append((n, _NAMES[index], spread(rate), spread(base), ratio))
    head = ("rows", "", "searches/s", "hnswlib (fp32)", "ours / hnswlib")
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
