"""``ppd-eval bench card``: the pool's search on a GPU beside exact search and cuVS' CAGRA."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ppd.ann.cuda.backend import backend_on
from ppd.ann.cuda.lanes import SIZES, CudaLaneSet
from ppd.ann.lanes import Target
from ppd.ann.neighbours import Finder
from ppd.ann.searches import MAX_ITOPK
from ppd.ann.snapshot import Precision, Shape, build
from ppd.ann.space import Metric, Rows
from ppd.errors import ConfigError

from ..provenance import provenance
from ..raw_rows import Write, appending
from . import card_rows, cards
from .cards import Find
from .given import print_progress
from .recall import RECALL, qps_at

LIMIT = 10
_WIDTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_ENOUGH = 0.99  # recall after which a curve is not followed
_SINGLE = 500  # searches one after the other
_RATE_WIDTHS = (64, 256)
_STEPS = (8, MAX_ITOPK)  # expansions of a lane per launch: few, as beside other work, and all
_QUERIES_AT_ONCE = 500  # of the truth: its distances must fit
_PACKAGES = ("torch", "triton", "cuvs-cu13", "numba", "faiss-cpu")

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        count: rows that are searched.
        seeds: nodes at which a search may begin; None for the pool's default.
        threads: of the graph's builder.
    """

    count: int
    dimensions: int
    queries: int
    seeds: int | None
    rounds: int
    seed: int
    threads: int


def run(plan: Plan, out: Path | None) -> int:
    """Measure all; the last line on stdout is one JSON object.

    Raises:
        ConfigError: PyTorch finds no CUDA device.
    """
    if plan.queries < SIZES[-1]:
        raise ConfigError(f"bench card: --queries must be {SIZES[-1]} or more")
    if not torch.cuda.is_available():
        raise ConfigError("bench card: PyTorch finds no CUDA device")
    origin = {
        **provenance(plan.seed),
        "gpu": torch.cuda.get_device_name(),
        "versions": _versions(),
        "n": plan.count,
        "dimensions": plan.dimensions,
    }
    with appending(out) as write:
        study = _Study(plan, torch.device("cuda"), lambda row: write(origin | row))
        print(json.dumps(study.measured()))
    return 0


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _Study:
    def __init__(self, plan: Plan, device: torch.device, write: Write) -> None:
        self._plan, self._device, self._write = plan, device, write
        self._summary: dict[str, Any] = {"n": plan.count, "dimensions": plan.dimensions}
        drawn = card_rows.clustered(plan.count + plan.queries, plan.dimensions, plan.seed, device)
        self._rows, queries = drawn[: plan.count], drawn[plan.count :]
        self._queries: Rows = queries.cpu().numpy()
        self._truth = _nearest(self._rows, queries)

    def measured(self) -> dict[str, Any]:
        """Measure the GPU's memory, the pool's lanes, then every index."""
        self._copy()
        target = self._timed("ours_cuda", self._target)
        self._rates(target)
        finds: dict[str, Find] = {
            "ours_cuda": cards.graph_search(target, LIMIT, self._device),
            "exact_cuda": cards.exact_search(target, LIMIT, self._device),
        }
        if "cuvs-cu13" in _versions():
            for name, dtype in (("cagra", torch.float32), ("cagra_fp16", torch.float16)):
                finds[name] = self._timed(name, partial(self._cagra, dtype))
        widths = self._curves(finds)
        for name, find in finds.items():
            self._single(name, find, widths[name])
        return self._summary

    def _cagra(self, dtype: torch.dtype) -> Find:
        from . import card_rivals

        return card_rivals.cagra_search(self._rows, LIMIT, Shape().degree, dtype)

    def _target(self) -> Target:
        plan = self._plan
        snapshot = build(
            self._rows.cpu().numpy(),
            np.arange(plan.count, dtype=np.int64),
            Metric.L2,
            Precision.INT8,
            Shape(seeds=plan.seeds),
            threads=plan.threads,
            seed=plan.seed,
            finder=Finder.AUTO,
        )
        return Target(snapshot, np.zeros(plan.count, np.uint8))

    def _timed(self, name: str, make: Callable[[], Made]) -> Made:
        began_s = time.perf_counter()
        made = make()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began_s
        print_progress(f"{name}: built in {seconds:.1f} s")
        self._write({"what": "build", "index": name, "seconds": seconds})
        return made

    def _copy(self) -> None:
        """Copy within the GPU's memory; bytes that are read and written count."""
        a = torch.ones(1 << 29, dtype=torch.int32, device=self._device)
        b = torch.empty_like(a)
        b.copy_(a)
        rates = [2 * a.nbytes / _device_s(lambda: b.copy_(a)) / 1e9 for _ in range(5)]
        self._write({"what": "copy", "gb_per_s": rates})
        self._summary["copy_gb_per_s"] = round(statistics.median(rates), 1)

    def _rates(self, target: Target) -> None:
        """Measure how many expansions a second lanes do, and the bytes that they read."""
        for count in SIZES:
            lanes = backend_on(self._device, count).make(target.snapshot, count, MAX_ITOPK)
            assert isinstance(lanes, CudaLaneSet)
            for width in _RATE_WIDTHS:
                for steps in _STEPS:
                    # The first round compiles and records the launch.
                    rounds = [
                        self._rate(lanes, count, width, steps, target)
                        for _ in range(self._plan.rounds + 1)
                    ][1:]
                    rate = statistics.median(rate for rate, _ in rounds)
                    gb_per_s = statistics.median(gb for _, gb in rounds)
                    row = {"what": "rate", "lanes": count, "width": width, "steps": steps}
                    self._write(row | {"expansions_per_s": rounds})
                    self._summary[f"rate_{count}_{width}_{steps}"] = [
                        round(rate),
                        round(gb_per_s, 1),
                    ]

    def _rate(
        self, lanes: CudaLaneSet, count: int, width: int, steps: int, target: Target
    ) -> tuple[float, float]:
        """Search in all lanes until the last one ends.

        Returns:
            Expansions a second, results included; and GB a second of rows and edges.
        """
        graph = target.snapshot.graph
        moved = target.snapshot.space.queries(self._queries[:count])
        places = lanes.admit(moved, [width] * count)
        torch.cuda.synchronize()
        began_s, left, done = time.perf_counter(), places, 0
        while left:
            at = lanes.advance(left, steps, [LIMIT] * len(left), [target.hidden] * len(left))
            done += at.expansions
            left = [place for place, over in zip(left, at.finished, strict=True) if not over]
        took_s = time.perf_counter() - began_s
        row_bytes = graph.codes.shape[1] * graph.codes.itemsize
        edge_bytes = graph.neighbours.shape[1] * graph.neighbours.itemsize
        read = lanes.rows_read(places) * row_bytes + done * edge_bytes
        return done / took_s, read / took_s / 1e9

    def _curves(self, finds: dict[str, Find]) -> dict[str, int]:
        """Measure recall and rate at every width; returns each index's width at ``RECALL``."""
        points: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in finds}
        names = list(finds)
        for number in range(self._plan.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for width, recall, qps in self._curve(finds[name]):
                    points[name].setdefault(width, []).append((recall, qps))
                    row = {"what": "curve", "index": name, "round": number, "width": width}
                    self._write(row | {"recall": recall, "qps": qps})
        widths = {}
        for name, of in points.items():
            medians = {
                width: tuple(statistics.median(values) for values in zip(*found, strict=True))
                for width, found in of.items()
            }
            self._summary[f"{name}_qps"] = qps_at(list(medians.values()))
            reached = [width for width, (recall, _) in medians.items() if recall >= RECALL]
            widths[name] = min(reached, default=_WIDTHS[-1])
            print_progress(f"{name}: {medians}")
        return widths

    def _curve(self, find: Find) -> Iterator[tuple[int, float, float]]:
        """Search all queries at once, at every width."""
        for width in _WIDTHS:
            find(self._queries[:100], width, 1)
            began_s = time.perf_counter()
            found = find(self._queries, width, 1)
            took_s = time.perf_counter() - began_s
            hits = (found[:, :, None] == self._truth[:, None, :]).any(2).mean()
            yield width, float(hits), self._queries.shape[0] / took_s
            if hits >= _ENOUGH:
                return

    def _single(self, name: str, find: Find, width: int) -> None:
        """Measure one search after the other, from host memory to host memory."""
        took_us = []
        for i in range(-50, _SINGLE):  # the first ones warm up
            query = self._queries[i % 100 : i % 100 + 1]
            began_s = time.perf_counter()
            find(query, width, 1)
            if i >= 0:
                took_us.append((time.perf_counter() - began_s) * 1e6)
        p50, p99 = (float(np.percentile(took_us, share)) for share in (50, 99))
        self._write({"what": "single", "index": name, "width": width, "p50_us": p50, "p99_us": p99})
        self._summary[f"{name}_single_us"] = [round(p50), round(p99)]


def _nearest(rows: torch.Tensor, queries: torch.Tensor) -> NDArray[np.int64]:
    """The ``LIMIT`` nearest rows of each query, by distances in float32."""
    squares = (rows * rows).sum(1)
    found = []
    for part in queries.split(_QUERIES_AT_ONCE):
        near = torch.addmm(squares, part, rows.T, alpha=-2)
        found.append(near.topk(LIMIT, largest=False).indices)
    nodes: NDArray[np.int64] = torch.cat(found).cpu().numpy()
    return nodes


def _device_s(work: Callable[[], object]) -> float:
    """The seconds that the GPU works on something."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
