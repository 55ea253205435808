"""Looking at workers again and again."""

from __future__ import annotations

import asyncio

import pytest

from ..scene import registry_of


async def test_a_look_that_fails_by_a_bug_is_told_and_all_are_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = registry_of(prefill=1, decode=1)  # nobody can be asked: there is no client
    probing = asyncio.create_task(pool.probe_forever(0.001))
    urls = [worker.url for worker in pool.workers]
    async with asyncio.timeout(10):
        while not all(caplog.text.count(f"a look at {url} failed") > 1 for url in urls):
            await asyncio.sleep(0)
            assert not probing.done()
    assert "AttributeError" in caplog.text
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
