"""What is counted, and that it is counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.decision import Decision, Reason, Route
from ppd.forecast import Forecast
from ppd.planning import Judgement
from ppd.policies import static_policy
from ppd.sessions import Hit, SessionIndex, Turn
from router.config.options import RouterConfig
from router.intake.inbound import Endpoint, Served
from router.intake.requests import parse
from router.observability.journal import Journal, opened_by
from router.observability.metrics import Metrics
from router.serving.context import RequestContext
from router.serving.ledger import Ledger
from router.serving.sse import Usage
from tests.unit.making import FEATURES

from ..scene import pool_of


@pytest.mark.parametrize(("evicted", "learned"), [(0, True), (208, False)])
def test_a_reply_that_was_dropped_has_not_come_back_otherwise(evicted: int, learned: bool) -> None:
    index = SessionIndex(capacity=9, ttl_s=9.0)
    ledger = ledger_of(Metrics(), index)
    before = Turn(1, 1, "", 900, 200, None, 0, 200.0)
    seen = replace(FEATURES, evicted_tokens=evicted)
    context = course_of(Judgement(Hit(before, b"", 9), seen, LOCAL, 0))
    home = pool_of(decode=1).workers[0]
    before.home = home.identity
    context.first_byte_s = 0.0
    ledger.learn(context, home, Usage(prompt_tokens=1120, completion_tokens=9, cached_tokens=896))
    assert context.inbound.chain is not None
    found = index.find(context.inbound.chain, 0.0)
    assert found is not None
    assert found.turn.loses_replies == learned


LOCAL = Decision(Route.LOCAL, Reason.POLICY_FULL)


def ledger_of(metrics: Metrics, index: SessionIndex) -> Ledger:
    return Ledger(
        index=index,
        policy=static_policy("full"),
        forecast=Forecast(),
        journal=Journal("", opened_by(RouterConfig(), None)),
        metrics=metrics,
        clock=lambda: 0.0,
        new_session=lambda: 1,
    )


def course_of(judged: Judgement) -> RequestContext:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    return RequestContext(
        inbound=parse(Endpoint.CHAT, body, "", Served(("m",))),
        number=1,
        session=1,
        tenant="t",
        kv_tokens=0,
        headers={},
        clients_key=False,
        arrived_s=0.0,
        judged=judged,
        decision=judged.decision,
    )


def test_a_request_ends_once() -> None:
    metrics = Metrics()
    ledger = ledger_of(metrics, SessionIndex(capacity=1, ttl_s=1.0))
    context = course_of(Judgement(None, None, Decision(Route.REMOTE, Reason.FIRST_TURN), 0))
    ledger.finished(context, "ok")
    ledger.finished(context, "disconnected")  # hung up on the last byte
    counts = {
        outcome: metrics.registry.get_sample_value(
            "ppd_finished_total", {"endpoint": Endpoint.CHAT.value, "outcome": outcome}
        )
        for outcome in ("ok", "disconnected")
    }
    assert counts == {"ok": 1.0, "disconnected": None}
