"""The router's own page in a browser, before a running router with real traffic."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from ..conftest import Client, Cluster
from ..fake_engine import FakeEngine, answering
from ..scene import LATER, local_unless_long, workers, write_table

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TOLD_BY_CHROMIUM = "Failed to load resource"  # of an answer that the test asked for

HOSTILE = "<img src=x onerror=document.title='taken'>"


def _chromium() -> str:
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        told = "the page is tested in Chromium, and there is none: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    return found


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = _chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


class Seen:
    """A page of ``browser``, and all that it says and asks for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text))

    async def is_(self, state: str) -> None:
        await expect(self.page.locator("html")).to_have_attribute("data-state", state)


async def opened(browser: Browser, client: Client, **options: Any) -> Seen:
    seen = Seen(await browser.new_page(**options))
    await seen.page.goto(f"{client.url}/dashboard")
    return seen


async def test_a_hybrid_is_drawn_with_its_replicas(cluster: Cluster, browser: Browser) -> None:
    replica = FakeEngine("null", answering(), local_prefill=False)
    async with cluster(*workers(), replica) as client:
        for i in range(8):
            await client.chat(f"hello {i}")
        page = (await opened(browser, client)).page
        await expect(page.locator("#flow .node")).to_have_count(4)
        await expect(page.locator("#flow .told")).to_contain_text(["remote", "local", "replica"])
        await expect(page.locator("#flow .way.replica.idle")).to_have_count(0)
        await expect(page.locator("#workers .card")).to_have_count(3)


async def test_what_it_shows_of_real_traffic(
    cluster: Cluster, browser: Browser, tmp_path: Path
) -> None:
    p, d = workers()
    p.model = d.model = HOSTILE
    table = write_table(tmp_path / "table.json", local_unless_long, model=HOSTILE)
    async with cluster(p, d, policy="ppd", table=str(table)) as client:
        seen = await opened(browser, client)
        page = seen.page
        await seen.is_("live")
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
        await expect(page.locator("#flow .told")).to_contain_text(["remote", "local"])
        await expect(page.locator("#reasons .bar")).to_have_count(2)
        await expect(page.locator("#ttft figure table tbody tr")).to_have_count(2)
        cards = page.locator("#workers .card")
        await expect(cards).to_have_count(2)
        await expect(cards.nth(1)).to_contain_text("offered")

        await rows.nth(0).click()
        detail = page.locator("#decisions .detail")
        await expect(detail).to_have_count(1)
        for word in ("context_tokens", "local saves TTFT", "context=[0,2048)", "cached_tokens"):
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

        d.ready = False
        await expect(page.locator(".card.down")).to_have_count(1)
        assert await page.title() == "sglang-ppd router"
        assert seen.hosts == {urlsplit(client.url).netloc}
        assert seen.complaints == []
        await page.close()


async def test_it_asks_for_the_admin_token(cluster: Cluster, browser: Browser) -> None:
    async with cluster(*workers(), admin_token="s3cret") as client:
        seen = await opened(browser, client)
        page = seen.page
        await seen.is_("locked")
        await expect(page.locator("main")).to_be_hidden()
        await page.locator("#token").fill("wrong")
        await page.locator("#token").press("Enter")
        await expect(page.locator("#token-problem")).to_have_text(
            "The router did not take that token."
        )
        await page.locator("#token").fill("s3cret")
        await page.locator("#token").press("Enter")
        await seen.is_("live")
        await page.reload()
        await seen.is_("live")
        assert all(_TOLD_BY_CHROMIUM in one for one in seen.complaints)
        await page.close()


async def test_it_says_that_the_router_is_gone_and_finds_it_again(
    cluster: Cluster, browser: Browser
) -> None:
    async with cluster(*workers()) as client:
        await client.chat("hello")
        seen = await opened(browser, client)
        await seen.is_("live")
        port = client.port
    page = seen.page
    await seen.is_("trouble")
    await expect(page.locator("#notice")).to_contain_text("cannot be reached")
    await expect(page.locator("#decisions tr[data-number]")).to_have_count(1)
    async with cluster(*workers(), port=port):
        await seen.is_("live")
        await expect(page.locator("#no-decisions")).to_be_visible()
    assert all(_TOLD_BY_CHROMIUM in one for one in seen.complaints)
    await page.close()


async def test_nothing_sticks_out_from_800_pixels_on(cluster: Cluster, browser: Browser) -> None:
    p, d = workers()
    async with cluster(p, d) as client:
        await client.chat("hello")
        await client.chat(*LATER)
        seen = await opened(browser, client)
        await seen.page.locator("#decisions tr[data-number]").first.click()
        for width in (800, 1180, 2200):
            await seen.page.set_viewport_size({"width": width, "height": 900})
            drawing = seen.page.locator("#flow .drawing")
            room = await drawing.evaluate("box => box.clientWidth")
            await expect(drawing.locator("svg")).to_have_attribute("width", str(room))
            for box in ("html", "#flow .drawing", "#ttft figure", "#decisions .scroll"):
                narrow = "box => box.scrollWidth <= box.clientWidth"
                assert await seen.page.locator(box).first.evaluate(narrow), (box, width)
        await seen.page.close()
