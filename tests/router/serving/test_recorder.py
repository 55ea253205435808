"""What is counted, and that it is counted once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ppd.arrivals import ArrivalRate
from ppd.attempts import Attempts
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.effects import Answered, Cause, ClientGone, Event, Failed, Failure, Settled, StreamEnded
from ppd.errors import EngineError
from ppd.forecast import Forecast
from ppd.outcome import Outcome
from ppd.placement import Placement, Plan, PlannedTurn
from ppd.planning import Planner
from ppd.policies import AlwaysRemote, static_policy
from ppd.sessions import Hit, SessionIndex, Turn
from router.config.options import RouterConfig
from router.intake.inbound import Endpoint, Served
from router.intake.requests import parse
from router.observability.journal import Journal, opened_by
from router.observability.metrics import Metrics
from router.serving.context import RequestContext
from router.serving.recorder import RequestRecorder
from router.workers.group import ModelWorkers
from router.workers.sglang import Usage
from tests.unit.fixtures import FEATURES

from ..fixtures import model_workers


@pytest.mark.parametrize(("evicted", "learned"), [(0, True), (208, False)])
def test_a_reply_that_was_dropped_has_not_come_back_otherwise(evicted: int, learned: bool) -> None:
    index = SessionIndex(capacity=9, ttl_s=9.0)
    group = model_workers(prefill=1, decode=1)
    recorder = recorder_of(Metrics(), index, group)
    home = group.of(Role.DECODE)[0]
    before = Turn(1, 1, home.identity, 900, 200, None, 0, 200.0)
    seen = replace(FEATURES, evicted_tokens=evicted)
    planned = PlannedTurn(Hit(before, b"", 9), seen, LOCAL, 0, 0, None, True, None)
    context = context_of(planned, group)
    context.attempts.start()
    context.deliver(Answered(streams=True))
    recorder.record_answer(
        context, home, Usage(prompt_tokens=1120, completion_tokens=9, cached_tokens=896)
    )
    assert context.inbound.chain is not None
    found = index.find(context.inbound.chain, 0.0)
    assert found is not None
    assert found.turn.loses_replies == learned


LOCAL = Decision(Route.LOCAL, Reason.POLICY_FULL)
REMOTE = Decision(Route.REMOTE, Reason.POLICY_PD)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def recorder_of(
    metrics: Metrics,
    index: SessionIndex,
    group: ModelWorkers,
    policy: Policy | None = None,
    clock: Clock | None = None,
) -> RequestRecorder:
    forecast = Forecast()
    return RequestRecorder(
        index=index,
        planner=Planner(
            policy=policy or static_policy("full"),
            placement=Placement(group, decode_fallback=False),
            index=index,
            arrivals=ArrivalRate(),
            forecast=forecast,
            backlog=Backlog(),
        ),
        forecast=forecast,
        journal=Journal("", opened_by(RouterConfig(), {})),
        metrics=metrics,
        clock=clock or Clock(),
        new_session=lambda: 1,
    )


def context_of(
    planned: PlannedTurn, group: ModelWorkers, clock: Clock | None = None
) -> RequestContext:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    placement = Placement(group, decode_fallback=False)
    return RequestContext(
        inbound=parse(Endpoint.CHAT, body, "", Served(("m",))),
        number=1,
        session=1,
        tenant="t",
        headers={},
        clients_key=False,
        arrived_s=0.0,
        planned=planned,
        attempts=Attempts(planned, placement, Backlog(), number=1),
        note=lambda _effect: None,
        clock=clock or Clock(),
    )


def test_a_request_ends_once() -> None:
    metrics, group = Metrics(), model_workers(prefill=1, decode=1)
    recorder = recorder_of(metrics, SessionIndex(capacity=1, ttl_s=1.0), group)
    first = Decision(Route.REMOTE, Reason.FIRST_TURN)
    context = context_of(PlannedTurn(None, None, first, 0, 0, None, True, None), group)
    context.attempts.start()
    context.deliver(Answered(streams=True))
    context.deliver(StreamEnded())
    recorder.finished(context, Outcome.OK)
    context.deliver(ClientGone())  # it hung up on the last byte
    recorder.finished(context, Outcome.DISCONNECTED)
    counts = {
        outcome: metrics.registry.get_sample_value(
            "ppd_finished_total", {"endpoint": Endpoint.CHAT.value, "outcome": outcome}
        )
        for outcome in ("ok", "disconnected")
    }
    assert counts == {"ok": 1.0, "disconnected": None}


class Observing(AlwaysRemote):
    """Keeps the TTFT and TPOT that it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[float | None, float | None]] = []

    def observe(
        self, features: Features, route: Route, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        self.seen.append((ttft_ms, tpot_ms))


UNCONNECTED = Failed(Failure(Cause.UNCONNECTED, EngineError("down", status=502)))


@pytest.mark.parametrize(
    ("home", "events", "seen"),
    [
        (0, [], [(300.0, 100.0)]),  # the 2 s before the decision are no part of the route
        (1, [], [(300.0, None)]),  # the features have the batch of another worker
        (0, [UNCONNECTED, Settled()], []),  # sent again
    ],
)
def test_the_policy_observes_what_the_planned_workers_took(
    home: int, events: list[Event], seen: list[tuple[float | None, float | None]]
) -> None:
    group, policy, clock = model_workers(prefill=1, decode=2), Observing(), Clock(2.0)
    index = SessionIndex(capacity=9, ttl_s=9.0)
    recorder = recorder_of(Metrics(), index, group, policy, clock)
    workers = group.of(Role.DECODE)
    before = Turn(1, 1, workers[home].identity, 900, 200, None, 0, 200.0)
    planned = PlannedTurn(Hit(before, b"", 9), FEATURES, REMOTE, 0, 0, None, True, None)
    prefill = group.of(Role.PREFILL)[0]
    planned.plan = Plan(REMOTE, workers[0], prefill, 0, 0)
    context = context_of(planned, group, clock)
    context.attempts.start()
    clock.now_s = 2.3
    for event in [*events, Answered(streams=True)]:
        context.deliver(event)
    context.streams = True
    clock.now_s = 3.1
    recorder.record_answer(
        context, workers[0], Usage(prompt_tokens=1120, completion_tokens=9, cached_tokens=0)
    )
    assert policy.seen == [pytest.approx(one) for one in seen]
