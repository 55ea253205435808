"""Fixtures: a pool with passages, and workers that answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..fake_engine import FakeEngine, answering
from .chats import on_topic
from .fake_pool import FakePool


@pytest.fixture
async def pool() -> AsyncIterator[FakePool]:
    """A pool with passages for every topic."""
    async with FakePool(on_topic).serving() as pool:
        yield pool


@pytest.fixture
def engines() -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode worker."""
    return FakeEngine("prefill", answering()), FakeEngine("decode", answering())
