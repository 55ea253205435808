"""aiohttp applications that tests serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from eval.fake_worker.listener import Listener


@asynccontextmanager
async def serving_app(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve on a free port while the context is open; gives the URL.

    Args:
        app: that is served.
        options: of :class:`aiohttp.web.AppRunner`.
    """
    runner = web.AppRunner(app, **options)
    await runner.setup()
    assert runner.server is not None
    listener = Listener(runner.server)
    try:
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        listener.close()
        await listener.wait_started()
        await runner.cleanup()
