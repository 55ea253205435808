"""Health checks in a loop."""

from __future__ import annotations

import asyncio

import pytest

from ..scene import registry_of


async def test_a_bug_in_a_health_check_is_logged_and_all_workers_are_checked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registry_of(prefill=1, decode=1)  # without a client, so that every check fails
    probing = asyncio.create_task(registry.probe_forever(0.001))
    texts = [f"the health check of {worker.url} failed" for worker in registry.workers]
    async with asyncio.timeout(10):
        while not all(caplog.text.count(text) > 1 for text in texts):
            await asyncio.sleep(0)
            assert not probing.done()
    assert "AttributeError" in caplog.text
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
