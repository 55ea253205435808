"""The client of chat streams that the demos and ``rag bench`` share, through a router."""

from __future__ import annotations

import pytest

from eval.chat import Conversation, ask, connected
from eval.fake_worker.request import Request
from eval.fake_worker.worker import FakeWorker
from ppd.errors import WorkerError

from .conftest import Cluster
from .fixtures import workers
from .scripts import answering, ending_early, failing, resetting, token


async def test_a_conversation_sends_its_history_and_counts_its_tokens(cluster: Cluster) -> None:
    p, d = workers()
    async with cluster(p, d) as router, connected(router.url) as client:
        conversation = Conversation(client, 7)
        first = await conversation.ask("hello", ignore_eos=True)
        assert conversation.context_tokens == 103
        second = await conversation.ask("and then?")
    assert (first.route, first.reason) == ("remote", "first_turn")
    assert (second.route, second.reason) == ("local", "policy_full")
    assert first.text == second.text == "w0w1w2"
    assert (second.prompt_tokens, second.completion_tokens, second.cached_tokens) == (100, 3, 96)
    assert 0 < second.ttft_ms < 60_000
    sent = d.bodies[1]["messages"]
    assert [one["content"] for one in sent] == ["hello", "w0w1w2", "and then?"]
    assert (d.bodies[0]["ignore_eos"], d.bodies[0]["max_tokens"]) == (True, 7)
    assert d.bodies[0]["temperature"] == 0


async def test_a_server_without_routes_is_no_error() -> None:
    async with (
        FakeWorker("null", answering()).serving() as worker,
        connected(worker.url) as client,
    ):
        reply = await ask(client, [{"role": "user", "content": "hello"}], 3)
    assert (reply.route, reply.reason) == ("-", "-")


async def silent(request: Request) -> None:
    """Stream a token without usage, and end in good order."""
    request.send(token("w") + b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (failing(400, "too long"), "too long"),
        (answering(words=0), "brought no text"),
        (resetting, "a turn failed"),
        (ending_early, "brought no usage"),
        (silent, "brought no usage"),
    ],
)
async def test_a_turn_that_fails_is_an_error(script: object, message: str) -> None:
    async with (
        FakeWorker("null", script).serving() as worker,  # type: ignore[arg-type]
        connected(worker.url) as client,
    ):
        with pytest.raises(WorkerError, match=message):
            await ask(client, [{"role": "user", "content": "hello"}], 3)
