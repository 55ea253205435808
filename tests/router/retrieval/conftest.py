"""A pool that knows passages, and workers that answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..fake_engine import FakeEngine, answering
from .chats import on_topic
from .fake_pool import FakePool


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    async with FakePool(on_topic).serving() as one:
        yield one


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("prefill", answering()), FakeEngine("decode", answering())
