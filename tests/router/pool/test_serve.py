"""The pool's process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ppd.ann import process
from ppd.errors import ConfigError
from router.pool.serve import serve

from .pools import config_for


@pytest.fixture(autouse=True)
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has other tests to run."""
    monkeypatch.setattr(process, "settle", lambda: None)


async def test_one_folder_has_one_pool(built: Path) -> None:
    config = config_for(built, port=0)
    for _ in range(2):  # what the first one held is free again
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(serve(config, started))
        both: set[asyncio.Future[Any]] = {running, started}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert started.result() > 0
        with pytest.raises(ConfigError, match=f"another pool serves {built}"):
            await serve(config)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=f"data: {tmp_path}: .*Is a directory"):
        await serve(config_for(tmp_path, port=0))
