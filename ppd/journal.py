"""The decision log: a router's decisions and their outcomes, in a form that can be replayed.

The log holds one JSON object per line, in the order of events. A replay through the policy of the
log gives the same decisions. A replay through another table, other weights or another policy
shows the decisions that would have changed. Each decision is a counterfactual by itself: the
load that the other decisions would have caused is not simulated.
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


class Opened(
    msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True, omit_defaults=True
):
    """The first event of a run: a router has started, or another policy decides from now on.

    Attributes:
        version: the format of the log, ``VERSION``.
        at: wall-clock time, ISO 8601. The other events count seconds of a monotonic clock.
        policy: the policy's name, as ``--policy`` has it.
        corrections: the corrections of a table policy.
        append_budget_tokens: the budget of the ``reservation`` correction.
        table: the digest of the table's file; "" without a table, and with several models.
        tables: the same by model, of several models.
        model: the one of several whose policy is another one; "": all of them.
    """

    version: int
    at: str
    policy: str
    corrections: tuple[Correction, ...]
    append_budget_tokens: int
    table: str
    tables: dict[str, str] = {}
    model: str = ""

    def table_of(self, model: str) -> str:
        """The digest of a model's table; "" without a table."""
        return self.tables.get(model, self.table)


class Decided(
    msgspec.Struct, frozen=True, tag="decided", forbid_unknown_fields=True, omit_defaults=True
):
    """The route of a turn was decided.

    Attributes:
        number: the number of the request, which ``Finished`` repeats.
        at_s: monotonic time.
        endpoint: the API endpoint that was called.
        tenant: the tenant that sent the request.
        objective: the weights or targets of the decision.
        features: the inputs of the decision; None if it needed none.
        model: the name of the model where the router serves several, else "".
    """

    number: int
    at_s: float
    endpoint: str
    tenant: str
    objective: Objective
    features: Features | None
    decision: Decision
    model: str = ""


class Finished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """A request has ended.

    Attributes:
        number: the number of the request, as in ``Decided``.
        at_s: monotonic time.
        route: the last route of the turn; a refused local turn ends as a remote one.
        reason: the reason of that route.
        outcome: the outcome of the request, as the label of ``ppd_finished``.
        observed: whether the policy observed the turn. It does so if the turn was answered to its
            end by the workers that were chosen at first.
        prompt_tokens: tokens of the prompt, as the worker counted them.
        cached_tokens: tokens of the prompt that were cached.
        completion_tokens: tokens of the reply.
        ttft_ms: time to the first event of a stream; None without one, as for a whole answer.
        tpot_ms: time per output token; None unless more than one token was streamed.
        at_home: whether it decoded on the worker that its features describe.
        waited_ms: from its arrival to the decision; ``ttft_ms`` has this time, too.
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
    at_home: bool = True
    waited_ms: float = 0.0

    def policy_times(self) -> tuple[float | None, float | None]:
        """Return TTFT and TPOT as policies observe them, in ms."""
        ttft_ms = None if self.ttft_ms is None else self.ttft_ms - self.waited_ms
        return ttft_ms, self.tpot_ms if self.at_home else None


class Reset(
    msgspec.Struct, frozen=True, tag="reset", forbid_unknown_fields=True, omit_defaults=True
):
    """An operator has discarded the observations of the policy.

    Attributes:
        at_s: monotonic time.
        model: of the policy where the router serves several, else "".
    """

    at_s: float
    model: str = ""


Event = Opened | Decided | Finished | Reset

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Event)


def to_line(event: Event) -> bytes:
    """Encode an event as one line of the log."""
    return _ENCODER.encode(event) + b"\n"


def read(lines: Iterable[bytes]) -> Iterator[Event]:
    """Read the events of a log of one or several runs.

    A truncated line at the end of a run is skipped: the router was killed while it wrote.

    Raises:
        ConfigError: a line is no event, or of another version; the message names the line.
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
    """One decision of a log, and the decision of the replay."""

    was: Decided
    now: Decision

    @property
    def changed(self) -> bool:
        """Whether the route differs."""
        return self.was.decision.route is not self.now.route

    @property
    def same(self) -> bool:
        """Whether the whole decision is equal, reason and costs included."""
        return self.was.decision == self.now


def of_model(events: Iterable[Event], model: str) -> Iterator[Event]:
    """The events of one model, as a router of this model alone would have logged them.

    Args:
        events: the events of a log.
        model: the name of one of several models; "" for a log of one model.

    Raises:
        ConfigError: the log has no such model, or "" was given and there are several.
    """
    for event in events:
        match event:
            case Opened(tables=tables):
                if model not in (tables or ("",)):
                    found = ", ".join(tables) or "one model without a name"
                    raise ConfigError(f"the log is of {found}: name one by --model")
                if event.model in ("", model):
                    yield msgspec.structs.replace(
                        event, table=event.table_of(model), tables={}, model=""
                    )
            case Finished():
                yield event
            case Decided() | Reset() if event.model == model:
                yield msgspec.structs.replace(event, model="")
            case _:
                pass


def replay(
    events: Iterable[Event],
    new_policy: Callable[[Opened], Policy],
    objective: Objective | None = None,
) -> Iterator[Replayed]:
    """Replay every decision of a log.

    Args:
        events: the events of the log.
        new_policy: creates the policy for a run. It observes the same turns as the run's own.
        objective: replaces the objective of each decision, if given.
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
                decided_on = features.pop(event.number, None)
                if decided_on is not None and event.observed:
                    policy.observe(decided_on, event.route, *event.policy_times())
            case Reset():
                if isinstance(policy, TablePolicy):
                    policy.reset()
            case _:
                assert_never(event)
