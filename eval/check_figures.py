"""The turns of two load clients in one form, and how far apart their figures are.

Pure functions. Both clients' figures come from the same formulas, from each turn: TTFT; TPOT,
(last token - first token) / (tokens - 1); gaps between chunks, in the same histogram; tokens a
second from the first send to the last token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .cluster import ClientError
from .samples import Sample, gap_bucket, gaps_of, sum_gaps
from .summary import spread, spread_of_gaps

METRICS = (
    ("ttft_ms", "mean"),
    ("ttft_ms", "p50"),
    ("ttft_ms", "p90"),
    ("ttft_ms", "p99"),
    ("tpot_ms", "mean"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p90"),
    ("itl_ms", "p50"),
    ("itl_ms", "p99"),
)


@dataclass(frozen=True, slots=True)
class ObservedTurn:
    """One turn that succeeded.

    Attributes:
        sent_at_s: on the client's own clock.
        late_ms: the send after it was due, as far as the client reports.
        gaps: between chunks with tokens, see :func:`eval.samples.gap_bucket`.
    """

    conversation: str
    turn: int
    sent_at_s: float
    late_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_ms: float
    tpot_ms: float
    gaps: tuple[tuple[int, int], ...]

    @property
    def last_token_at_s(self) -> float:
        """When the last token came, on the client's own clock."""
        return self.sent_at_s + 1e-3 * (self.ttft_ms + self.tpot_ms * (self.output_tokens - 1))


def of_ours(samples: Sequence[Sample]) -> list[ObservedTurn]:
    """Convert the turns of our load generator that succeeded."""
    return [
        ObservedTurn(
            conversation=str(sample.conversation),
            turn=sample.turn,
            sent_at_s=sample.sent_at_s,
            late_ms=sample.late_ms,
            prompt_tokens=sample.context_tokens + sample.new_tokens,
            output_tokens=sample.output_tokens,
            cached_tokens=sample.cached_tokens,
            ttft_ms=sample.ttft_ms,
            tpot_ms=sample.tpot_ms,
            gaps=sample.gaps,
        )
        for sample in samples
        if not sample.error
    ]


def of_aiperf(records: Path) -> list[ObservedTurn]:
    """Read the turns that succeeded from AIPerf's ``profile_export.jsonl`` (version 0.13).

    Raises:
        ClientError: it wrote none, or something else.
    """
    if not records.exists():
        raise ClientError(f"AIPerf wrote no {records}")
    return list(_of_aiperf(records))


def _of_aiperf(records: Path) -> Iterator[ObservedTurn]:
    for number, line in enumerate(records.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            metadata, values = record["metadata"], record["metrics"]
            if record.get("error") is not None:
                continue
            metrics = {name: values[name]["value"] for name in _WANTED}
            gaps = Counter(gap_bucket(gap) for gap in values["inter_chunk_latency"]["value"])
            cached = values.get("usage_prompt_cache_read_tokens", {"value": 0})["value"]
            sent_ns = metadata["request_start_ns"]
            yield ObservedTurn(
                conversation=metadata["x_correlation_id"],
                turn=metadata["turn_index"] + 1,
                sent_at_s=1e-9 * sent_ns,
                late_ms=round(1e-6 * (sent_ns - metadata["credit_issued_ns"]), 2),
                prompt_tokens=metrics["usage_prompt_tokens"],
                output_tokens=metrics["usage_completion_tokens"],
                cached_tokens=cached,
                ttft_ms=round(metrics["time_to_first_token"], 3),
                tpot_ms=round(metrics["inter_token_latency"], 3),
                gaps=gaps_of(gaps),
            )
        except (ValueError, LookupError, TypeError) as error:
            raise ClientError(f"{records}:{number}: no record of AIPerf: {error!r}") from error


_WANTED = (
    "usage_prompt_tokens",
    "usage_completion_tokens",
    "time_to_first_token",
    "inter_token_latency",
)


def figures(seen: Sequence[ObservedTurn]) -> dict[str, Any]:
    """Compute the figures of one run from its turns."""
    tokens = sum(turn.output_tokens for turn in seen)
    begun_s = min(turn.sent_at_s for turn in seen)
    took_s = max(turn.last_token_at_s for turn in seen) - begun_s
    summary = {
        "ttft_ms": spread([turn.ttft_ms for turn in seen]),
        "tpot_ms": spread([turn.tpot_ms for turn in seen]),
        "itl_ms": spread_of_gaps(sum_gaps([turn.gaps for turn in seen])),
        "late_ms": spread([turn.late_ms for turn in seen]),
    }
    return {
        "turns": len(seen),
        "took_s": round(took_s, 3),
        "output_tokens_per_s": round(tokens / took_s, 2),
        "cached_tokens": sum(turn.cached_tokens for turn in seen),
        **{name: None if found is None else asdict(found) for name, found in summary.items()},
    }


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare two clients by the medians over rounds, and by the rounds' mean difference.

    ``above_engine_ms`` is how much the means of ours and of AIPerf are above what the engine itself
    measured while that client ran. The engine takes longer in one run than in the next, and for a
    chat than for token ids. It has no percentiles.

    Args:
        rows: of kind ``run``.
    """
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["round"]), {})[row["client"]] = row
    differences = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        pairs = [
            (of["ours"], of["aiperf"])
            for (of_kind, _), of in sorted(found.items())
            if of_kind == kind and len(of) == 2
        ]
        for metric, of in (*METRICS, ("output_tokens_per_s", "")):
            values = [tuple(_value(run, metric, of) for run in pair) for pair in pairs]
            gaps = [ours - theirs for ours, theirs in values]
            middle = [median(value[side] for value in values) for side in (0, 1)]
            differences.append(
                {
                    "kind": kind,
                    "metric": f"{metric} {of}".strip(),
                    "rounds": len(pairs),
                    "ours": round(middle[0], 3),
                    "aiperf": round(middle[1], 3),
                    "difference": round(fmean(gaps), 3),
                    "least": round(min(gaps), 3),
                    "most": round(max(gaps), 3),
                    "percent": round(100 * fmean(gaps) / middle[1], 1),
                    "above_engine_ms": _above_engine(pairs, metric) if of == "mean" else None,
                }
            )
    return differences


def _value(run: Mapping[str, Any], metric: str, of: str) -> float:
    return float(run[metric][of] if of else run[metric])


_ENGINE_NAMES = {"ttft_ms": "time_to_first_token_ms", "tpot_ms": "inter_token_latency_ms"}


def _above_engine(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], metric: str
) -> list[float] | None:
    name = _ENGINE_NAMES[metric]
    if not all(name in run["engine"] for pair in pairs for run in pair):
        return None
    return [
        round(median(pair[side][metric]["mean"] - pair[side]["engine"][name] for pair in pairs), 3)
        for side in (0, 1)
    ]


_LINE = "{:<7} {:<20} {:>9} {:>9} {:>11} {:>17} {:>7}  {}"


def as_text(differences: Sequence[Mapping[str, Any]]) -> str:
    """Format the differences as a table."""
    head = ("kind", "", "ours", "AIPerf", "difference", "of rounds", "%", "above engine: each")
    lines = [_LINE.format(*head)]
    for row in differences:
        above = row["above_engine_ms"]
        engine = "" if above is None else "{:g}, {:g}".format(*above)
        between = f"{row['least']:g} to {row['most']:g}"
        fields = (row["ours"], row["aiperf"], row["difference"], between, row["percent"], engine)
        lines.append(_LINE.format(row["kind"], row["metric"], *fields))
    return "\n".join(lines)
