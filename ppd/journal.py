"""The decision log: what a router decided and what came of it, so that it can be replayed.

One JSON object a line, in the order of events. Replaying them through the policy they were
made with gives the same decisions; through another table, other weights or another policy,
what would have changed. A counterfactual for each decision by itself: the load that the
other decisions would have made is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

import msgspec

from ppd.decision import Decision, Features, Policy, Reason, Route, decide
from ppd.errors import ConfigError
from ppd.score import Objective
from ppd.table_policy import Correction, TablePolicy

VERSION = 1


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """A router has started.

    Attributes:
        at: the time of day, ISO 8601; the other events count seconds of a monotonic clock.
        policy: as ``--policy`` named it.
        table: the digest of the table's file; "" without one.
    """

    version: int
    at: str
    policy: str
    corrections: tuple[Correction, ...]
    append_budget_tokens: int
    table: str


class Decided(msgspec.Struct, frozen=True, tag="decided", forbid_unknown_fields=True):
    """A turn's route was decided. ``number`` is the request's."""

    number: int
    at_s: float
    endpoint: str
    tenant: str
    objective: Objective
    features: Features | None
    decision: Decision


class Finished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """A turn has been answered, or has ended otherwise.

    Attributes:
        route, reason: as they came to be: a refused local turn ends as a remote one.
        outcome: ``answered``, or how it ended otherwise, in the words of ``ppd_finished``.
        observed: it was told to the policy: it streamed undisturbed, on the route decided at first.
        ttft_ms: None if no worker spoke; ``tpot_ms``: None unless it streamed more than one token.
    """

    number: int
    at_s: float
    route: Route
    reason: Reason
    outcome: str
    observed: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Reset(msgspec.Struct, frozen=True, tag="reset", forbid_unknown_fields=True):
    """What was observed has been forgotten, at an operator's wish."""

    at_s: float


Event = Opened | Decided | Finished | Reset

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Event)


def to_line(event: Event) -> bytes:
    return _ENCODER.encode(event) + b"\n"


def read(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a log, of one run of a router or several.

    A line that was cut short is left out where a run ends: the router was killed while it wrote.

    Raises:
        ConfigError: naming the line that is no event.
    """
    broken: ConfigError | None = None
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            event = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            if broken is not None:
                raise broken from error
            broken = ConfigError(f"line {number} is no event of a decision log: {error}")
            continue
        if broken is not None and (number == 2 or not isinstance(event, Opened)):
            raise broken
        broken = None
        if isinstance(event, Opened):
            if event.version != VERSION:
                raise ConfigError(
                    f"line {number}: the log's version is {event.version}, this reads {VERSION}"
                )
        elif number == 1:
            raise ConfigError("line 1 must be an opened event: the log's beginning is missing")
        yield event
    if broken is not None:
        raise broken


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision as it was and as it would be; ``changed`` is its route, ``same`` all of it."""

    was: Decided
    now: Decision

    @property
    def changed(self) -> bool:
        return self.was.decision.route is not self.now.route

    @property
    def same(self) -> bool:
        return self.was.decision == self.now


def replay(
    events: Iterable[Event],
    new_policy: Callable[[Opened], Policy],
    objective: Objective | None = None,
) -> Iterator[Replayed]:
    """Every decision of a log again.

    Args:
        new_policy: makes the policy of a run, which is told what that run's was told.
        objective: in place of each decision's own.
    """
    features: dict[int, Features] = {}
    policy: Policy | None = None
    for event in events:
        if isinstance(event, Opened):
            policy = new_policy(event)
            features.clear()
            continue
        assert policy is not None, "read() gives no log without a beginning"
        match event:
            case Decided():
                began = event.decision.route if event.decision.route is Route.REPLICA else None
                if event.decision.reason is Reason.BATCH:
                    now = Decision(began or policy.opening, Reason.BATCH)
                else:
                    now = decide(event.features, policy, objective or event.objective, began)
                if event.features is not None:
                    features[event.number] = event.features
                yield Replayed(event, now)
            case Finished():
                seen = features.pop(event.number, None)
                if seen is not None and event.observed:
                    assert event.ttft_ms is not None
                    assert event.tpot_ms is not None
                    policy.observe(seen, event.route, event.ttft_ms, event.tpot_ms)
            case Reset():
                if isinstance(policy, TablePolicy):
                    policy.observed.reset()
            case _:
                assert_never(event)
