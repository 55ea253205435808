"""The dashboard in Chromium, with a running router and real traffic."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Error, Page, async_playwright, expect

from eval.fake_worker.worker import FakeWorker
from router.config.models import ModelOptions

from ..conftest import Client, Cluster
from ..fixtures import LATER, local_unless_long, workers, write_table
from ..scripts import answering
from ..workers.test_kv_events import kv_events_info

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_RESOURCE_ERROR = "Failed to load resource"  # Chromium's message for an error response

ROLES = ("prefill", "decode")
HOSTILE = "<img src=x onerror=document.title='taken'>"


def _chromium() -> str:
    """Return Chromium's path. Without one the test is skipped, or fails where CI is set."""
    path = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if path is None:
        reason = "Chromium is not installed (apt-get install chromium): the page is not tested"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = _chromium()
    async with async_playwright() as playwright:
        try:
            browser = await playwright.chromium.launch(executable_path=path)
        except Error as error:
            pytest.fail(f"{path} is installed but does not start: {error}")
        yield browser
        await browser.close()


class RecordedPage:
    """A page, the errors and messages of its scripts, and the hosts of its requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.hosts: set[str] = set()
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("console", lambda message: self.messages.append(message.text))

    async def expect_state(self, state: str) -> None:
        await expect(self.page.locator("html")).to_have_attribute("data-state", state)


async def open_dashboard(browser: Browser, client: Client, **options: Any) -> RecordedPage:
    recorded = RecordedPage(await browser.new_page(**options))
    await recorded.page.goto(f"{client.url}/dashboard")
    return recorded


async def test_a_hybrid_is_drawn_with_its_replicas(cluster: Cluster, browser: Browser) -> None:
    replica = FakeWorker("null", answering(), local_prefill=False)
    async with cluster(*workers(), replica) as client:
        for i in range(8):
            await client.chat(f"hello {i}")
        page = (await open_dashboard(browser, client)).page
        await expect(page.locator("#flow .node")).to_have_count(4)
        await expect(page.locator("#flow .caption")).to_contain_text(["remote", "local", "replica"])
        await expect(page.locator("#flow .way.replica.idle")).to_have_count(0)
        await expect(page.locator("#workers .card")).to_have_count(3)


async def test_each_rank_has_a_card(cluster: Cluster, browser: Browser) -> None:
    p, d = workers()
    p.dp_size, d.dp_size = 2, 4
    async with cluster(p, d, policy="full") as client:
        for i in range(8):
            opening = f"hello {i}"
            await client.chat(opening)
            await client.chat(opening, "www", "and")
        page = (await open_dashboard(browser, client)).page
        cards = page.locator("#workers .card")
        await expect(cards).to_have_count(6)
        ids = [
            f"{urlsplit(one.url).netloc}@{rank}" for one in (p, d) for rank in range(one.dp_size)
        ]
        await expect(cards).to_contain_text(ids)


async def test_the_page_shows_real_traffic(
    cluster: Cluster, browser: Browser, tmp_path: Path
) -> None:
    p, d = workers()
    p.model = d.model = HOSTILE
    table = write_table(tmp_path / "table.json", local_unless_long, model=HOSTILE)
    async with cluster(p, d, policy="ppd", table=str(table)) as client:
        recorded = await open_dashboard(browser, client)
        page = recorded.page
        await recorded.expect_state("live")
        await expect(page.locator("#no-decisions")).to_be_visible()
        await expect(page.locator(".way.idle")).to_have_count(3)
        await expect(page.locator("#facts")).to_contain_text(HOSTILE)

        assert (await client.chat("hello", model=HOSTILE, stream=True)).status == 200
        reply = await client.chat(*LATER, model=HOSTILE, stream=True)
        assert reply.route == ("local", "table")
        rows = page.locator("#decisions tr[data-number]")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0)).to_contain_text("table")
        await expect(rows.nth(1)).to_contain_text("first_turn")
        await expect(page.locator("#no-decisions")).to_be_hidden()
        await expect(page.locator(".way.idle")).to_have_count(0)
        await expect(page.locator("#flow .caption")).to_contain_text(["remote", "local"])
        await expect(page.locator("#reasons .bar")).to_have_count(2)
        await expect(page.locator("#ttft figure table tbody tr")).to_have_count(2)
        cards = page.locator("#workers .card")
        await expect(cards).to_have_count(2)
        await expect(cards.nth(1)).to_contain_text("offered")

        await rows.nth(0).click()
        detail = page.locator("#decisions .detail")
        await expect(detail).to_have_count(1)
        words = ("context_tokens", "local saves TTFT", "context=[0,2048)", "cached_tokens")
        for word in (*words, "By the measured cell"):
            await expect(detail).to_contain_text(word)
        # An open decision holds the table still.
        await client.chat("another", model=HOSTILE)
        await expect(page.locator("#resume")).to_have_text("held: show 1 newer")
        await expect(rows).to_have_count(2)
        await page.locator("#resume").click()
        await expect(rows).to_have_count(3)
        await expect(detail).to_have_count(0)
        await rows.nth(0).locator("button").press("Enter")
        await expect(detail).to_contain_text("No earlier request")

        await expect(page.locator("#alerts .good")).to_have_count(1)
        d.ready = False
        await expect(page.locator(".card.down")).to_have_count(1)
        alerts = page.locator("#alerts .bad")
        await expect(alerts).to_have_count(2)
        await expect(alerts.nth(0)).to_have_text("No decode worker is ready.")
        await expect(alerts.nth(1)).to_contain_text("is down: it does not answer probes")
        assert await page.title() == "sglang-ppd router"
        assert recorded.hosts == {urlsplit(client.url).netloc}
        assert recorded.messages == []
        await page.close()


async def test_fallbacks_are_marked(cluster: Cluster, browser: Browser) -> None:
    events = kv_events_info(1)  # where nothing listens
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(), kv_events=events)
    plain = FakeWorker("decode", answering(), local_prefill=False)
    async with cluster(p, d, plain, policy="ppd", decode_fallback=True) as client:
        page = (await open_dashboard(browser, client)).page
        await expect(page.locator("#alerts .bad")).to_have_count(0)
        for text in ("sends no KV events", "offers no local prefill", "There is no decision table"):
            await expect(page.locator("#alerts .warn").filter(has_text=text)).to_have_count(1)
        p.ready = False
        lost = page.locator("#alerts .bad").filter(has_text="Decode workers prefill whole prompts")
        await expect(lost).to_have_count(1)
        p.ready = True
        await expect(page.locator("#alerts .bad")).to_have_count(0)
        await page.close()


async def test_the_page_requests_the_admin_token(cluster: Cluster, browser: Browser) -> None:
    async with cluster(*workers(), admin_token="s3cret") as client:
        recorded = await open_dashboard(browser, client)
        page = recorded.page
        await recorded.expect_state("locked")
        await expect(page.locator("main")).to_be_hidden()
        await page.locator("#token").fill("wrong")
        await page.locator("#token").press("Enter")
        await expect(page.locator("#token-problem")).to_have_text("The router refused that token.")
        await page.locator("#token").fill("s3cret")
        await page.locator("#token").press("Enter")
        await recorded.expect_state("live")
        await page.reload()
        await recorded.expect_state("live")
        assert all(_RESOURCE_ERROR in message for message in recorded.messages)
        await page.close()


async def test_the_page_reports_a_stopped_router_and_reconnects(
    cluster: Cluster, browser: Browser
) -> None:
    async with cluster(*workers()) as client:
        await client.chat("hello")
        recorded = await open_dashboard(browser, client)
        await recorded.expect_state("live")
        port = client.port
    page = recorded.page
    await recorded.expect_state("trouble")
    await expect(page.locator("#notice")).to_contain_text("cannot be reached")
    await expect(page.locator("#decisions tr[data-number]")).to_have_count(1)
    async with cluster(*workers(), port=port):
        await recorded.expect_state("live")
        await expect(page.locator("#no-decisions")).to_be_visible()
    assert all(_RESOURCE_ERROR in message for message in recorded.messages)
    await page.close()


async def test_nothing_overflows_from_400_pixels_on(cluster: Cluster, browser: Browser) -> None:
    p, d = workers()
    async with cluster(p, d) as client:
        await client.chat("hello")
        await client.chat(*LATER)
        recorded = await open_dashboard(browser, client)
        await recorded.page.locator("#decisions tr[data-number]").first.click()
        for width in (400, 800, 1180, 2200):
            await recorded.page.set_viewport_size({"width": width, "height": 900})
            drawing = recorded.page.locator("#flow .drawing")
            room = await drawing.evaluate("box => box.clientWidth")
            view = f"0 0 {max(640, room)} "
            await expect(drawing.locator("svg")).to_have_attribute("viewBox", re.compile(view))
            boxes = ["html", "#flow .drawing", "#ttft figure"]
            if width >= 800:  # a telephone scrolls the table
                boxes.append("#decisions .scroll")
            for box in boxes:
                narrow = "box => box.scrollWidth <= box.clientWidth"
                assert await recorded.page.locator(box).first.evaluate(narrow), (box, width)
        await recorded.page.close()


async def test_several_models_are_named(cluster: Cluster, browser: Browser) -> None:
    models = {"red": ModelOptions(), "blue": ModelOptions()}
    engines = [FakeWorker(role, answering(), model=name) for name in models for role in ROLES]
    async with cluster(*engines, models=models) as client:
        await client.chat("hello", model="blue")
        opened = await open_dashboard(browser, client)
        page = opened.page
        for engine in engines:
            card = page.locator(f'[data-worker="127.0.0.1:{engine.port}"]')
            await expect(card).to_contain_text(engine.model)
        await page.locator("#decisions tbody tr button").first.click()
        await expect(page.locator("#decisions .detail")).to_contain_text("blue")
        engines[1].vanish()
        await expect(page.locator("#alerts")).to_contain_text("No decode worker of red is ready.")
        assert opened.messages == []
