"""Construction of what routers share, and its life."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from ppd.errors import ConfigError
from ppd.extras import install

from ..apis.response_store import ResponseStore
from ..config.options import RouterConfig
from ..observability.metrics import Metrics
from ..shared.metrics import SharedMetrics
from ..shared.sharing import SealedRecords, Sharing
from ..workers.registry import WorkerRegistry
from .tasks import background_task


def make_sharing(
    config: RouterConfig,
    registry: WorkerRegistry,
    metrics: Metrics,
    responses: ResponseStore,
) -> Sharing | None:
    """Return what is shared with other routers; None without ``[shared]``.

    Raises:
        ConfigError: a library is not installed, or the key of stored responses is wrong.
    """
    if config.shared is None:
        return None
    try:
        from ..shared.sealing import Sealing
        from ..shared.store import ResponseRecords, Store
    except ImportError as error:
        raise ConfigError(f"[shared] needs more packages: {install('shared')} ({error})") from error
    ttl_s = config.shared.ttl_s or config.session_ttl_s
    sealed = None
    if config.shared.responses:
        sealing = Sealing(config.shared.encryption_key())
        sealed = SealedRecords(ResponseRecords(config.shared, ttl_s), sealing)
    return Sharing(
        config=config.shared,
        store=Store(config.shared, ttl_s),
        ttl_s=ttl_s,
        registry=registry,
        metrics=SharedMetrics(metrics.registry),
        clock=time.monotonic,
        wall_clock=time.time,
        sealed=sealed,
        forget=responses.forget,
    )


@asynccontextmanager
async def sharing(shared: Sharing) -> AsyncIterator[None]:
    """Share with other routers while the context is open."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(shared.close)
        for work in shared.tasks():
            await stack.enter_async_context(background_task(work))
        await shared.catch_up()
        yield
