"""The raw files of a report: read, checked, with their origin.

A file that is not there is reported, and is no error. A broken one is an error, which names file
and line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ppd.errors import ConfigError

from ..raw_rows import read_rows
from .machines import machines

Row = Mapping[str, Any]


class _Origin(msgspec.Struct, frozen=True):
    commit: str
    hardware: str
    at: str
    seed: int
    model: str = ""
    load_average: float | None = None


class RouteRow(_Origin, frozen=True, kw_only=True):
    """A row of ``route-map.jsonl``."""

    profile: str
    link_gbps: float
    context_tokens: float
    new_tokens: float
    output_tokens: float
    qps: float
    remote_ttft_ms: float
    local_ttft_ms: float
    remote_ttft_p90_ms: float
    local_ttft_p90_ms: float
    remote_tpot_ms: float
    local_tpot_ms: float
    choice: Literal["local", "remote", "tie"]


class _SpreadRow(msgspec.Struct, frozen=True):
    n: int
    mean: float
    p50: float
    p90: float
    p99: float


class _LatencyRow(msgspec.Struct, frozen=True):
    ttft_ms: _SpreadRow | None
    tpot_ms: _SpreadRow | None
    itl_ms: _SpreadRow | None
    e2e_ms: _SpreadRow | None


class _SampleColumns(msgspec.Struct, frozen=True):
    turn: list[int]
    route: list[str]


class GridRow(_Origin, frozen=True, kw_only=True):
    """A row of ``policy-grid.jsonl``."""

    grid: str
    side: str
    shape: str
    qps: float
    turns: int
    planned: int
    success_rate: float
    output_tokens_per_s: float
    arrivals_s: float
    timeout_s: float
    sizes: tuple[int, int, int]
    think_s: float
    latencies: dict[str, _LatencyRow]
    samples: _SampleColumns


class CompareRow(msgspec.Struct, frozen=True):
    """A row of ``compare.jsonl``: a turn, or a run."""

    row: str
    trace: str
    way: str
    seed: int


class VerdictRow(_Origin, frozen=True, kw_only=True):
    """A row of ``payoff.jsonl``: the verdicts on one trace and machine."""

    trace: str
    windows: int
    ways: dict[str, dict[str, float]]
    verdicts: list[dict[str, Any]]
    profile: str
    link_gbps: float
    calibration_factor: float


class DemoRow(_Origin, frozen=True, kw_only=True):
    """A row of ``demo.jsonl``; the older ones have one way only."""

    ttft_ms: list[float]
    delta_ttft_ms: list[float] = []
    full_ttft_ms: list[float] = []


class InterferenceRow(_Origin, frozen=True, kw_only=True):
    """A row of ``interference.jsonl``."""

    round: int
    context: int
    batch: int
    prefills: int
    kind: str
    tpot_ms: float
    longest_gap_ms: float


class _MixRow(msgspec.Struct, frozen=True):
    grid: str
    conversations: int
    qps: float


class WeightsRow(_Origin, frozen=True, kw_only=True):
    """A row of ``weights-cpu.jsonl``."""

    w_ttft: float
    w_tpot: float
    local_share: float
    later_turns: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    mix: _MixRow


class ScenarioRow(_Origin, frozen=True, kw_only=True):
    """A row of ``scenarios.jsonl``."""

    name: str
    requests: int
    prompt: int
    reply: int
    batch: int
    scale: int
    turns: int
    side: str
    round: int
    planned: int
    ok: int
    wall_s: float
    output_tokens_per_s: float
    latencies: dict[str, _LatencyRow]


class _CheckSpread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float


class CheckRow(_Origin, frozen=True, kw_only=True):
    """A ``run`` row of ``check-load``."""

    kind: str
    client: str
    round: int
    turns: int
    output_tokens_per_s: float
    ttft_ms: _CheckSpread
    tpot_ms: _CheckSpread
    itl_ms: _CheckSpread
    engine: dict[str, float]


class ClaimRow(msgspec.Struct, frozen=True):
    """A ``claim`` row of ``simulate paper``."""

    group: str
    name: str
    paper: float
    simulated: float | None


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of a raw file, and where they were measured."""

    file: str
    rows: Sequence[Row]
    origins: Sequence[_Origin]

    def only(self, rows: Sequence[Row]) -> Source:
        """Return some of these rows, all of which have an origin of their own."""
        origins = [msgspec.convert(row, _Origin) for row in rows]
        return Source(self.file, rows, origins)

    def origin(self) -> str:
        """Return one line: rows, commits, hardware, seeds, model, days, machines of profiles."""
        origins = self.origins
        parts = [f"{self.file}, {len(self.rows)} rows"]
        parts.append("commit " + _listed(row.commit for row in origins))
        parts.append(_listed(row.hardware for row in origins))
        if loads := [row.load_average for row in origins if row.load_average is not None]:
            parts.append(f"load average {min(loads):g} to {max(loads):g}")
        seeds = sorted({row.seed for row in origins})
        parts.append(("seeds " if len(seeds) > 1 else "seed ") + ", ".join(map(str, seeds)))
        if models := {row.model for row in origins} - {""}:
            parts.append("model " + _listed(models))
        parts.append(_listed(row.at[:10] for row in origins))
        parts += machines(self.rows)
        return " · ".join(parts)


def _listed(values: Any) -> str:
    return ", ".join(sorted(set(values)))


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A raw file that is not there.

    Attributes:
        run: the command that makes the file.
    """

    file: str
    run: str


def read_source(
    folder: Path, name: str, kind: type[msgspec.Struct], run: str, only: str | None = None
) -> Source | NotMeasured:
    """Read and check a raw file.

    Args:
        kind: what each row must be; if it has no origin, rows of kind ``run`` must.
        run: the command that makes the file.
        only: of ``row``, where a file has rows of several kinds.

    Raises:
        ConfigError: a row is not what it should be; the message names file and line.
    """
    path = folder / name
    label = f"{folder.name}/{name}"
    if not path.exists():
        return NotMeasured(label, run)
    rows: list[Row] = []
    origins: list[_Origin] = []
    for number, row in read_rows(path):
        wanted = only is None or row.get("row") == only
        try:
            if wanted:
                found = msgspec.convert(row, kind)
                rows.append(row)
                if isinstance(found, _Origin):
                    origins.append(found)
            if not issubclass(kind, _Origin) and row.get("row") == "run":
                origins.append(msgspec.convert(row, _Origin))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    if not rows:
        return NotMeasured(label, run)
    if not origins:
        raise ConfigError(f"{path}: no row has commit, hardware and seed")
    return Source(label, rows, origins)


def newest(source: Source, key: str) -> Source:
    """Return the rows that agree with the last one in ``key``."""
    last = source.rows[-1][key]
    return source.only([row for row in source.rows if row[key] == last])
