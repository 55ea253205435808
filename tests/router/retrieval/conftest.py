"""Fixtures: a pool with passages, and workers that answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eval.fake_worker.worker import FakeWorker

from ..scripts import answering
from .chats import on_topic
from .fake_pool import FakePool


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    """A pool with passages for every topic."""
    async with FakePool(on_topic).serving() as pool:
        yield pool


@pytest.fixture
def engines() -> tuple[FakeWorker, FakeWorker]:
    """A prefill and a decode worker."""
    return FakeWorker("prefill", answering()), FakeWorker("decode", answering())
