"""A sweep's raw file: a row for each turn, one for each run, one for each time the sweep began.

A run is written as a whole, its summary last: what was cut short is measured again, and nothing
that was measured is ever lost.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ppd import __version__
from ppd.decision import Route
from ppd.errors import ConfigError

from ..provenance import provenance
from ..raw_rows import append_whole, end_last_line
from ..samples import Sample
from .config import Place, Run, SweepConfig


@dataclass(frozen=True, slots=True)
class RunResult:
    """One complete run: its summary and its turns, as the file has them."""

    run: Run
    summary: dict[str, Any]
    turns: list[dict[str, Any]]

    def later(self) -> Iterator[dict[str, Any]]:
        """Return the later turns on the right route: a refused local turn measured neither."""
        wanted = self.run.route
        for turn in self.turns:
            on_route = wanted is None or turn["route"] == wanted
            if on_route and turn["turn"] > 1 and not turn["error"]:
                yield turn

    def medians(self) -> tuple[float, float] | None:
        """Return TTFT and TPOT of the later turns, in ms; None if there were none."""
        later = list(self.later())
        if not later:
            return None
        return (
            statistics.median(turn["ttft_ms"] for turn in later),
            statistics.median(turn["tpot_ms"] for turn in later),
        )


def read_runs(config: SweepConfig, raw: Path) -> Iterator[RunResult]:
    """Yield each complete run of this configuration.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    turns: list[dict[str, Any]] = []
    try:
        lines = raw.read_bytes().split(b"\n") if raw.exists() else []
    except OSError as error:
        raise ConfigError(f"{raw}: cannot be read: {error}") from error
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was cut short
        try:
            row = json.loads(line)
            match row["row"]:
                case "turn":
                    turns.append(row)
                case "run":
                    result = _run_result(row, turns) if row["config"] == config.digest else None
                    turns = []
                    if result is not None:
                        yield result
                case "sweep":
                    turns = []
                case other:
                    raise ValueError(f"no such row: {other}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{raw}:{number}: no row of a sweep: {error!r}") from error


def _run_result(row: dict[str, Any], turns: list[dict[str, Any]]) -> RunResult | None:
    c, n, o = row["workload"]
    run = Run(Place((c, n, o), row["qps"]), row["policy"], row["seed"])
    if row["turns"] > len(turns):
        return None
    return RunResult(run, row, turns[len(turns) - row["turns"] :])


def served_by(model: str) -> dict[str, object]:
    """Return the fields of a row that name what was measured: model and versions."""
    return {
        "model": Path(model).name,
        "engine": f"sglang {version('sglang')}",
        "plugin": __version__,
    }


class Writer:
    """Appends the rows of a sweep to its file.

    Args:
        where: fields of each row that name what is measured; they replace those of this machine.
    """

    def __init__(self, config: SweepConfig, out: Path, where: Mapping[str, object]) -> None:
        self._config = config
        self._out = out
        self._where = where

    def begin(self) -> None:
        """All that it takes to do it again.

        Raises:
            ConfigError: nothing can be written there.
        """
        asked = msgspec.to_builtins(self._config)
        try:
            end_last_line(self._out)
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be written: {error}") from error
        row = {"row": "sweep", "config": self._config.digest, "asked": asked}
        append_whole(self._out, [{**row, **self._provenance(0), **self._where}])

    def write(
        self,
        run: Run,
        samples: Sequence[Sample],
        wall_s: float,
        cluster: str,
        more: Mapping[str, object] | None = None,
    ) -> RunResult:
        """Write the rows of one run, and return its result.

        Args:
            more: fields of the run's row.

        Raises:
            ConfigError: it cannot be written; what was measured before is kept.
        """
        turns = [{"row": "turn", **asdict(sample)} for sample in samples]
        summary = {
            "row": "run",
            "config": self._config.digest,
            "workload": run.place.workload,
            "qps": run.place.qps,
            "policy": run.policy,
            "turns": len(samples),
            "failed": sum(bool(sample.error) for sample in samples),
            "strayed": _strayed(run.route, samples),
            "wall_s": round(wall_s, 2),
            "cluster": cluster,
            **(more or {}),
            **self._provenance(run.seed),
            **self._where,
        }
        append_whole(self._out, [*turns, summary])
        return RunResult(run, summary, turns)

    def _provenance(self, seed: int) -> dict[str, object]:
        origin = provenance(seed)
        return origin | {"hardware": self._config.hardware} if self._config.hardware else origin


def _strayed(route: Route | None, samples: Iterable[Sample]) -> int:
    """Later turns that succeeded on another route than the one measured: refused ones.

    Conversations that live on replicas are not measured. Failed turns count as failed alone.
    """
    if route is None:
        return 0
    later = [sample for sample in samples if sample.turn > 1 and not sample.error]
    return sum(sample.route not in (route, Route.REPLICA) for sample in later)
