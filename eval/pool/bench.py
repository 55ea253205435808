"""``ppd-eval bench pool``: the pool's search beside others', and its scheduler beside simpler ones.

Interleaved rounds, medians; raw rows go to a file, the last line printed sums them up.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ppd.ann.space import Rows

from ..provenance import provenance
from ..raw_rows import Write, appending
from . import burst_study, hdf5, huge_pages, over_http
from . import rivals as pool_rivals
from .burst_rounds import Rounds
from .given import Given, Sample, print_progress, split
from .hdf5 import Published
from .recall import RECALL, qps_at
from .rivals import LIMIT, Ids, Index

_WIDTHS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_ENOUGH = 0.985  # recall after which a curve is not followed
_LARGE_DIMENSIONS, _LARGE_CLUSTERS = 128, 2000
_LARGE_SWEPT = ("hnswlib_32_200",)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        sample: the small collection; if it has no rows, nothing is measured with it.
        large: rows of the clustered collection; 0: none.
        hdf5: files of published sets. If there are some, only the indexes on these are compared.
        indexes: names of the indexes; none: all of them on the small and the published sets. On
            the clustered one, of those with other parameters, ``_LARGE_SWEPT``.
    """

    sample: Sample
    large: int
    hdf5: tuple[Path, ...]
    indexes: tuple[str, ...]
    rounds: int
    burst_s: float
    threads: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Point:
    """One round of one index at one width."""

    index: str
    width: int
    threads: int
    recall: float
    qps: float


def run(plan: Plan, out: Path | None) -> int:
    """Measure all parts; the last line on stdout is one JSON object."""
    huge_pages.ensure()
    with appending(out) as write:
        summary: dict[str, Any] = {}
        sample = plan.sample
        origin = provenance(sample.seed)
        for published in (hdf5.read(path, LIMIT) for path in plan.hdf5):
            summary[published.name] = _compare(published, plan, pool_rivals.ALL, write, origin)
        if plan.hdf5:
            print(json.dumps(summary))
            return 0
        if sample.count:
            summary |= _small(plan, write, origin)
        if plan.large:
            rows, queries = split(
                clustered(plan.large + sample.queries, sample.seed), sample.queries
            )
            clusters = _with_truth("large", rows, queries)
            names = (*pool_rivals.NAMES, *_LARGE_SWEPT)
            summary["large"] = _compare(clusters, plan, names, write, origin)
    print(json.dumps(summary))
    return 0


def _small(plan: Plan, write: Write, origin: dict[str, object]) -> dict[str, Any]:
    """Measure all that has the sentences as its rows."""
    sample = plan.sample
    rows, queries, source = sample.embedded()
    small = _with_truth("small", rows, queries)
    given = Given(rows, plan.threads)
    compared = _compare(small, plan, pool_rivals.ALL, write, origin | source, given)
    rounds = Rounds(given.target, queries, plan.threads, plan.burst_s, sample.seed)
    bursty, identical = burst_study.measure(rounds, plan.rounds, write, origin)
    for row in over_http.rows(rows, queries, plan.rounds, plan.threads, plan.logs):
        write(origin | {"set": "small"} | row)
    return {"small": compared, "bursty": bursty, "identical_ids": identical}


def clustered(count: int, seed: int) -> Rows:
    """Draw clusters of very different sizes, each a tilted ellipsoid in few of the dimensions."""
    source = np.random.default_rng(seed)
    d, inner = _LARGE_DIMENSIONS, 24
    centres = source.normal(size=(_LARGE_CLUSTERS, d)).astype(np.float32)
    weights = source.pareto(1.2, _LARGE_CLUSTERS) + 0.05
    chosen = source.choice(_LARGE_CLUSTERS, count, p=weights / weights.sum())
    bases = source.normal(size=(64, inner, d)).astype(np.float32) / np.sqrt(inner)
    rows = np.empty((count, d), np.float32)
    for start in range(0, count, 65536):
        part = slice(start, min(count, start + 65536))
        mine = chosen[part]
        spread = source.normal(size=(mine.size, inner)).astype(np.float32)
        rows[part] = 0.6 * centres[mine]
        for basis in range(64):
            at = np.flatnonzero(mine % 64 == basis)
            rows[part][at] += spread[at] @ bases[basis]
        rows[part] += 0.15 * source.normal(size=(mine.size, d)).astype(np.float32)
    return rows


def _with_truth(name: str, rows: Rows, queries: Rows) -> Published:
    return Published(name, rows, queries, faiss.knn(queries, rows, LIMIT)[1])


def _compare(
    of: Published,
    plan: Plan,
    names: Sequence[str],
    write: Write,
    origin: dict[str, object],
    given: Given | None = None,
) -> dict[str, Any]:
    name, rows, queries, truth = of.name, of.rows, of.queries, of.truth
    given = given or Given(rows, plan.threads)
    indexes = []
    for index_name in plan.indexes or names:
        began_s = time.perf_counter()
        indexes.append(pool_rivals.make(index_name, given))
        built_s = time.perf_counter() - began_s
        print_progress(
            f"{name}: {index_name} of {rows.shape[0]} x {rows.shape[1]} built in {built_s:.0f} s"
        )
        write(origin | {"what": "build", "set": name, "index": index_name, "seconds": built_s})
        indexes[-1].find(queries[:50], 32, 1)
    points: dict[tuple[str, int, int], list[Point]] = defaultdict(list)
    for number in range(plan.rounds):
        for threads in (1, plan.threads):
            for index in indexes[number % len(indexes) :] + indexes[: number % len(indexes)]:
                for point in _curve(index, queries, truth, threads):
                    points[index.name, point.width, threads].append(point)
                    row = {"what": "curve", "set": name, "n": rows.shape[0], "round": number}
                    write(origin | row | asdict(point))
    summary: dict[str, Any] = {"n": rows.shape[0], "recall": RECALL}
    for index in indexes:
        for threads in (1, plan.threads):
            summary[f"{index.name}_qps_{threads}t"] = _qps_at(points, index.name, threads)
    for index in indexes:
        if index.name in ("ours", "ours_fp32", "hnswlib", "faiss_hnsw_sq"):
            width = _width_at(points, index.name)
            took = _one_by_one(index, queries, width, plan.rounds)
            p50, p99 = (float(np.percentile(took, share)) * 1e6 for share in (50, 99))
            summary[f"{index.name}_p50_us"], summary[f"{index.name}_p99_us"] = (
                round(p50, 1),
                round(p99, 1),
            )
            row = {"what": "single", "set": name, "index": index.name, "width": width}
            write(origin | row | {"p50_us": p50, "p99_us": p99})
    print_progress(json.dumps({name: summary}))
    return summary


def _curve(index: Index, queries: Rows, truth: Ids, threads: int) -> list[Point]:
    points = []
    for width in _WIDTHS:
        began_s = time.perf_counter()
        found = index.find(queries, width, threads)
        took_s = time.perf_counter() - began_s
        hits = sum(
            len(set(a) & set(b)) for a, b in zip(found.tolist(), truth.tolist(), strict=True)
        )
        recall = hits / truth.size
        points.append(Point(index.name, width, threads, recall, queries.shape[0] / took_s))
        if recall >= _ENOUGH:
            break
    return points


def _qps_at(
    points: dict[tuple[str, int, int], list[Point]], name: str, threads: int
) -> float | None:
    """Of medians over the rounds."""
    return qps_at(
        [
            (statistics.median(p.recall for p in found), statistics.median(p.qps for p in found))
            for (index, _, used), found in sorted(points.items())
            if index == name and used == threads
        ]
    )


def _width_at(points: dict[tuple[str, int, int], list[Point]], name: str) -> int:
    """The least that reaches the recall wanted."""
    return min(
        (
            width
            for (index, width, _), found in points.items()
            if index == name and statistics.median(p.recall for p in found) >= RECALL
        ),
        default=_WIDTHS[-1],
    )


def _one_by_one(index: Index, queries: Rows, width: int, rounds: int) -> list[float]:
    took = []
    for _ in range(rounds):
        for i in range(queries.shape[0]):
            began_s = time.perf_counter()
            index.find(queries[i : i + 1], width, 1)
            took.append(time.perf_counter() - began_s)
    return took
