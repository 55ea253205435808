"""What is counted, and that it is counted once."""

from __future__ import annotations

from ppd.decision import Decision, Reason, Route
from ppd.forecast import Forecast
from ppd.judge import Judgement
from ppd.policies import static_policy
from ppd.sessions import SessionIndex
from router.config import RouterConfig
from router.intake.inbound import Endpoint, Served
from router.intake.requests import parse
from router.seeing.journal import Journal, opened_by
from router.seeing.metrics import Metrics
from router.serving.course import Course
from router.serving.ledger import Ledger


def test_a_request_ends_once() -> None:
    metrics = Metrics()
    index = SessionIndex(capacity=1, ttl_s=1.0)
    ledger = Ledger(
        index=index,
        policy=static_policy("full"),
        forecast=Forecast(),
        journal=Journal("", opened_by(RouterConfig(), None)),
        metrics=metrics,
        clock=lambda: 0.0,
        new_session=lambda: 1,
    )
    decision = Decision(Route.REMOTE, Reason.FIRST_TURN)
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    course = Course(
        inbound=parse(Endpoint.CHAT, body, "", Served(("m",))),
        number=1,
        session=1,
        tenant="t",
        kv_tokens=0,
        headers={},
        clients_key=False,
        arrived_s=0.0,
        judged=Judgement(None, None, decision, 0),
        decision=decision,
    )
    ledger.finished(course, "ok")
    ledger.finished(course, "disconnected")  # hung up on the last byte
    counts = {
        outcome: metrics.registry.get_sample_value(
            "ppd_finished_total", {"endpoint": Endpoint.CHAT.value, "outcome": outcome}
        )
        for outcome in ("ok", "disconnected")
    }
    assert counts == {"ok": 1.0, "disconnected": None}
