"""What is counted, and that it is counted once."""

from __future__ import annotations

from ppd.decision import Decision, Reason, Route
from ppd.sessions import SessionIndex
from router.course import Course
from router.ledger import Ledger
from router.metrics import Metrics
from router.requests import Endpoint, Served, parse


def test_a_request_ends_once() -> None:
    metrics = Metrics()
    index = SessionIndex(capacity=1, ttl_s=1.0)
    ledger = Ledger(index=index, metrics=metrics, clock=lambda: 0.0, new_session=lambda: "s")
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    course = Course(
        inbound=parse(Endpoint.CHAT, body, "", Served(("m",))),
        headers={},
        arrived_s=0.0,
        hit=None,
        features=None,
        decision=Decision(Route.REMOTE, Reason.FIRST_TURN),
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
