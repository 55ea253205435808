"""``ppd-eval table replay-decisions``: a decision log under another table, weights or policy."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ppd.decision import Decision, Policy, Route
from ppd.errors import ConfigError, TableError
from ppd.journal import Opened, Replayed, of_model, read, replay
from ppd.policies import static_policy
from ppd.score import Objective, Weights
from ppd.table import Table
from ppd.table_policy import Correction, TablePolicy

from .objective import add_targets, add_weights, objective_of
from .options import Commands


@dataclass(frozen=True, slots=True)
class Changes:
    """What to replay with in place of the log's own; None: as it was.

    Attributes:
        model: whose decisions are replayed; "": of the one model.
    """

    table: Path | None
    policy: str | None
    corrections: frozenset[Correction] | None
    objective: Objective | None
    model: str = ""


def add_to(commands: Commands) -> None:
    """Declare ``table replay-decisions``."""
    parser = commands.add_parser(
        "replay-decisions",
        help="a decision log under another table, weights or policy",
        description=(
            "Replay a decision log under another table, other weights or another policy, "
            "and print what would have changed. The last line is one JSON object."
        ),
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--policy", help="replaces the log's policy")
    parser.add_argument("--corrections", nargs="*", choices=[*Correction], help="replace the log's")
    parser.add_argument("--model", default="", help="one of several models of the log")
    parser.add_argument("--show", type=int, default=20, help="changed decisions to print")
    add_weights(parser)
    add_targets(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what would have changed; the last line is one JSON object.

    Raises:
        ConfigError: the log or the options are wrong.
        TableError: the table is.
    """
    corrections = options.corrections
    changes = Changes(
        table=options.table,
        policy=options.policy,
        corrections=None if corrections is None else frozenset(corrections),
        objective=objective_of(options),
        model=options.model,
    )
    return run_replay(options.log, changes, options.show)


def run_replay(log: Path, changes: Changes, max_shown: int) -> int:
    """Print what would have changed; the last line is one JSON object.

    Raises:
        ConfigError: the log or the options are wrong.
        TableError: the table is.
    """
    try:
        with log.open("rb") as lines:
            events = of_model(read(lines), changes.model)
            result = list(replay(events, _policies(changes), changes.objective))
    except OSError as error:
        raise ConfigError(f"{log}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{log}: {error}") from error
    changed = [replayed for replayed in result if replayed.changed]
    for replayed in changed[:max_shown]:
        print(_line(replayed))
    if len(changed) > max_shown:
        print(f"... and {len(changed) - max_shown} more")
    print(json.dumps(summary(result)))
    return 0


def summary(result: Iterable[Replayed]) -> dict[str, object]:
    """Counts of a replay. Shares are of the turns that any policy could have sent either way."""
    result = list(result)
    free = [replayed for replayed in result if replayed.was.features is not None]
    moved = Counter(
        f"{_decision_text(replayed.was.decision)} -> {_decision_text(replayed.now)}"
        for replayed in result
        if replayed.changed
    )
    return {
        "decisions": len(result),
        "later_turns": len(free),
        "changed": sum(replayed.changed for replayed in result),
        "identical": sum(replayed.same for replayed in result),
        "local_share_before": _share(replayed.was.decision.route for replayed in free),
        "local_share_after": _share(replayed.now.route for replayed in free),
        "moves": dict(moved.most_common()),
    }


def _share(routes: Iterable[Route]) -> float | None:
    routes = list(routes)
    if not routes:
        return None
    return round(sum(route is Route.LOCAL for route in routes) / len(routes), 4)


def _line(replayed: Replayed) -> str:
    seen = replayed.was.features
    was, now = _decision_text(replayed.was.decision), _decision_text(replayed.now)
    text = f"request {replayed.was.number}: {was} -> {now}"
    if seen is None:
        return text
    return (
        f"{text}; "
        f"turn {seen.turn}, context {seen.context_tokens}, new {seen.new_tokens}, "
        f"output {seen.output_tokens}, {seen.qps:.2f} qps"
    )


def _decision_text(decision: Decision) -> str:
    return f"{decision.route} ({decision.reason})"


def _policies(changes: Changes) -> Callable[[Opened], Policy]:
    table, digest = None, ""
    if changes.table is not None:
        try:
            data = changes.table.read_bytes()
            table, digest = Table.parse(data), hashlib.sha256(data).hexdigest()[:16]
            if isinstance(changes.objective, Weights) and changes.objective.throughput:
                table.require_throughput()
        except (OSError, TableError) as error:
            raise TableError(f"{changes.table}: {error}") from error

    def new_policy(opened: Opened) -> Policy:
        spec = changes.policy or opened.policy
        if spec != "ppd":
            return static_policy(spec)
        if changes.table is None and opened.table:
            raise ConfigError(f"it was made with a table ({opened.table}): give one by --table")
        print(
            f"run of {opened.at}: {opened.policy}, table {opened.table or 'none'}; "
            f"replayed by {spec}, table {digest or 'none'}"
        )
        corrections = frozenset(opened.corrections)
        if changes.corrections is not None:
            corrections = changes.corrections
        return TablePolicy(table, corrections, opened.append_budget_tokens)

    return new_policy
