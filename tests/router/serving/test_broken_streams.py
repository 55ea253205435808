"""Streams that meet what should not happen: each ends, once, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from eval.fake_worker.request import Request
from ppd.attempts import Attempts
from ppd.backlog import Backlog
from ppd.decision import Decision, Reason, Route
from ppd.effects import (
    Abandon,
    Answered,
    ClientGone,
    Effect,
    Failed,
    Finish,
    PassageFound,
    Prime,
    Relay,
    StreamBroke,
)
from ppd.outcome import Outcome
from ppd.placement import Placement, PlannedTurn
from router.intake.inbound import Endpoint, Served
from router.intake.requests import parse
from router.serving.context import RequestContext
from tests.unit.test_attempts import BROKEN
from tests.waiting import HANG_S

from ..conftest import Cluster
from ..fixtures import model_workers
from .test_resume import LOST, chunk, cut_off, scripted_workers


async def test_content_that_is_no_text_ends_the_stream(cluster: Cluster) -> None:
    """What a client was sent cannot be put into a prompt: a bug of the engine, not a hang."""
    odd = cut_off(1, chunk(1, role="assistant", content=""), chunk(1, content=5))
    workers, _ = scripted_workers(odd, odd)
    async with cluster(*workers, resume_streams=1) as client:
        with pytest.raises(Exception, match=r"payload|closed|disconnected"):
            await asyncio.wait_for(client.chat("hello", stream=True), HANG_S)
        labels = {"endpoint": "/v1/chat/completions", "outcome": "internal_error"}
        assert await client.metric("ppd_finished_total", **labels) == 1


async def test_a_rest_that_does_not_stream_is_no_rest(cluster: Cluster) -> None:
    async def whole(request: Request) -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}}
        request.answer({"id": "x", "choices": [choice]})

    workers, _ = scripted_workers(LOST, whole)
    async with cluster(*workers, resume_streams=1) as client:
        reply = await asyncio.wait_for(client.chat("hello", stream=True), HANG_S)
        assert [("error" in event) for event in reply.events].count(True) == 1


def context() -> tuple[RequestContext, list[Effect]]:
    """A remote turn that has been sent, and the effects that were noted for it."""
    group, noted = model_workers(prefill=1, decode=2), list[Effect]()
    first = Decision(Route.REMOTE, Reason.FIRST_TURN)
    planned = PlannedTurn(None, None, first, 0, 0, None, True, None)
    placement = Placement(group, decode_fallback=False)
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    one = RequestContext(
        number=1,
        session=1,
        inbound=parse(Endpoint.CHAT, body, "", Served(("m",))),
        tenant="t",
        headers={},
        clients_key=False,
        arrived_s=0.0,
        planned=planned,
        attempts=Attempts(planned, placement, Backlog(), number=1, max_resumptions=1),
        note=noted.append,
        clock=lambda: 0.0,
    )
    one.attempts.start()
    return one, noted


async def test_a_passage_does_not_replace_the_answer_that_is_to_be_relayed() -> None:
    one, _ = context()
    one.deliver(Answered(streams=True))
    one.deliver(PassageFound())
    assert isinstance(await one.next_effect(), Relay)
    assert isinstance(await one.next_effect(), Prime)


async def test_an_end_replaces_all_that_is_pending() -> None:
    one, _ = context()
    one.deliver(Answered(streams=True))
    one.deliver(PassageFound())
    one.deliver(StreamBroke(resumable=True))
    one.deliver(ClientGone())
    effect = await one.next_effect()
    assert effect == Finish(Outcome.DISCONNECTED)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await one.next_effect()


async def test_a_failure_is_noted_though_the_client_leaves_before_it_is_settled() -> None:
    one, noted = context()
    waiting = asyncio.create_task(one.next_effect())
    await asyncio.sleep(0)
    one.deliver(Failed(BROKEN))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [effect.blamed for effect in noted if isinstance(effect, Abandon)] == [True]


async def test_a_bug_in_a_callback_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    one, _ = context()

    def bug(effect: Effect) -> None:
        raise ZeroDivisionError

    one._note = bug
    one.deliver(Answered(streams=True))
    assert await one.next_effect() == Finish(Outcome.INTERNAL_ERROR)
    assert "could not be handled" in caplog.text
