"""The feedback to the pool about KV links and streams."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from aiohttp import web

from router.retrieval.feedback import Feedback, Totals
from router.retrieval.link_use import LinkUse
from tests.apps import serving_app


def test_without_a_given_speed_the_use_is_of_the_highest_rate_so_far() -> None:
    link = LinkUse(None)
    assert [link.observe(carried, 2.0) for carried in (0, 400, 100, 800, 400)] == [
        0.0,
        1.0,
        pytest.approx(0.25, rel=1e-3),
        1.0,
        pytest.approx(0.5, rel=1e-3),
    ]
    before = link.observe(40, 1.0)
    link.observe(1, 3600.0)
    assert link.observe(40, 1.0) == pytest.approx(2 * before, rel=1e-3)  # an hour ago counts half


class RecordingPool:
    """A pool that records the feedback."""

    def __init__(self) -> None:
        self.received: list[dict[str, float]] = []
        self.status = 200

    async def receive(self, request: web.Request) -> web.Response:
        self.received.append(orjson.loads(await request.read()))
        return web.json_response({}, status=self.status)


async def test_each_interval_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pool, app = RecordingPool(), web.Application()
    app.router.add_post("/v1/feedback", pool.receive)
    now_s, totals = 100.0, Totals(0, 0.0, 0)
    async with aiohttp.ClientSession() as client:
        async with serving_app(app) as url:
            feedback = Feedback(
                url=f"{url}/",
                interval_s=5.0,
                link=LinkUse(1000.0),
                totals=lambda: totals,
                client=client,
                clock=lambda: now_s,
            )
            now_s, totals = 102.0, Totals(500, 8.0, 400)
            await feedback.send()
            now_s, totals = 103.0, Totals(9_000, 8.0, 400)
            await feedback.send()
            assert pool.received == [
                {"kv_link_use": 0.25, "token_ms": 20.0},
                {"kv_link_use": 1.0, "token_ms": None},
            ]
            pool.status = 404
            for _ in range(3):
                await feedback.send()
            assert caplog.text.count("takes no feedback: it answered 404") == 1
        await feedback.send()
