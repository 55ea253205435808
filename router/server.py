"""The router's parts, put together: started, served, stopped.

The token path has a server of its own (``router.wire``); all else that is asked on the same
address is answered by an aiohttp application.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from ppd import __version__
from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.decision import Policy
from ppd.errors import ConfigError
from ppd.forecast import Forecast
from ppd.journal import VERSION as JOURNAL_VERSION
from ppd.journal import Opened
from ppd.judge import Judge
from ppd.sessions import SessionIndex

from .admin import Admin
from .app import application, lobby, refuse
from .breaker import Breaker
from .config import RouterConfig
from .dispatch import Dispatcher
from .journal import Journal
from .ledger import Ledger
from .membership import Membership
from .metrics import Metrics
from .operations import Operations
from .requests import Endpoint
from .tables import TableFile, make_policy
from .turns import TurnServer
from .wire.client import Upstreams
from .wire.reading import Limits
from .wire.request import Request
from .wire.server import WireServer
from .wishes import WishBook
from .workers import WorkerPool, connect

logger = logging.getLogger("ppd.router")

_GRACE_S = 10.0  # for requests under way when the router stops
_KEEP_S = 4.0  # SGLang's HTTP server closes what was idle for 5


async def serve(config: RouterConfig) -> None:
    """Run until SIGTERM or SIGINT; raises as ``running`` does."""
    stop = asyncio.Event()
    async with running(config) as url:
        # Not before: a signal while workers are waited for ends the process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        logger.info("sglang-ppd %s: policy %s, listening on %s", __version__, config.policy, url)
        await stop.wait()
        logger.info("stopping")


@asynccontextmanager
async def running(config: RouterConfig, policy: Policy | None = None) -> AsyncIterator[str]:
    """A router that serves while the context is open; gives its base URL.

    Args:
        policy: in place of the one that ``config`` names.

    Raises:
        ConfigError: the options are wrong, or the address is taken.
        TableError: the decision table is.
        WorkerError: a worker does not answer, or is not what it was given as.
    """
    config.check()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=5.0)
    ) as control:
        urls = {
            Role.PREFILL: config.prefill,
            Role.DECODE: config.decode,
            Role.REPLICA: config.replica,
        }
        listener = bind(config)
        async with AsyncExitStack() as stack:
            stack.callback(listener.close)
            pool = await connect(
                control,
                urls,
                config.startup_timeout_s,
                lambda: Breaker(config.breaker_failures, config.breaker_rest_s),
            )
            membership = Membership(
                pool,
                roles=config.roles,
                token=config.worker_token or os.environ.get("PPD_WORKER_TOKEN", ""),
                budget_s=config.heartbeat_budget_s,
                clock=time.monotonic,
            )
            if config.accept_workers:
                membership.warn_if_open(config.host)
                async with serving(lobby(membership), listener.dup(), config):
                    await membership.complete()
            table: TableFile | None = None
            if policy is None:
                policy, table = make_policy(config, pool.models, pool.shape)
            journal = open_journal(config, table)
            stack.callback(journal.close)
            await stack.enter_async_context(owned(pool.probe_forever(config.probe_interval_s)))
            upstreams = Upstreams(
                connect_s=config.connect_timeout_s,
                answer_s=config.answer_timeout_s,
                silence_s=config.idle_timeout_s,
                keep_s=_KEEP_S,
            )
            stack.push_async_callback(upstreams.close)
            app, turns = make_parts(config, policy, table, pool, journal, upstreams)
            if config.accept_workers:
                membership.add_routes(app)
                await stack.enter_async_context(owned(membership.watch_forever()))
            await stack.enter_async_context(serving(app, listener, config, turns))
            host, port = listener.getsockname()[:2]
            yield f"http://{host}:{port}"


def bind(config: RouterConfig) -> socket.socket:
    """Takes the address; nobody can connect before it is served.

    Raises:
    ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Named, or asyncio does not switch Nagle's algorithm off on what is accepted.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return listener


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    config: RouterConfig,
    turns: TurnServer | None = None,
) -> AsyncIterator[None]:
    """
    Args:
        turns: serves the token path; None: ``app`` answers there too.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S
    )
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=() if turns is None else tuple(Endpoint),
        handler=nobody if turns is None else turns.serve,
        elsewhere=runner.server,
        refuse=refuse if turns is None else turns.refuse,
        limits=Limits(
            head_bytes=config.max_head_bytes,
            body_bytes=config.max_body_bytes,
            request_s=config.client_request_timeout_s,
            idle_s=config.client_idle_timeout_s,
            stall_s=config.client_stall_timeout_s,
        ),
    )
    try:
        await server.start(listener)
        try:
            yield
        finally:
            await server.stop(_GRACE_S)
    finally:
        await runner.cleanup()


async def nobody(request: Request) -> None:
    raise AssertionError("no path is served here")


@asynccontextmanager
async def owned(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """``work`` goes on while the context is open."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def open_journal(config: RouterConfig, table: TableFile | None) -> Journal:
    opened = Opened(
        version=JOURNAL_VERSION,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=config.policy,
        corrections=tuple(sorted(config.corrections)),
        append_budget_tokens=config.append_budget_tokens,
        table=table.digest if table else "",
    )
    return Journal(config.decision_log, opened)


def make_parts(
    config: RouterConfig,
    policy: Policy,
    table: TableFile | None,
    pool: WorkerPool,
    journal: Journal,
    upstreams: Upstreams,
) -> tuple[web.Application, TurnServer]:
    """The application for operators, and what serves the token path."""
    clock = time.monotonic
    metrics, arrivals, backlog, forecast = Metrics(), ArrivalRate(), Backlog(), Forecast()
    index = SessionIndex(capacity=config.session_capacity, ttl_s=config.session_ttl_s)
    turns = TurnServer(
        pool=pool,
        judge=Judge(
            policy=policy,
            cluster=pool,
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
        ),
        arrivals=arrivals,
        wishes=WishBook(config),
        dispatcher=Dispatcher(
            upstreams=upstreams,
            pool=pool,
            backlog=backlog,
            metrics=metrics,
            clock=clock,
            new_room=lambda: random.getrandbits(63),
            escapes=config.escape_to_decode,
        ),
        ledger=Ledger(
            index=index,
            policy=policy,
            forecast=forecast,
            journal=journal,
            metrics=metrics,
            clock=clock,
            new_session=lambda: f"{random.getrandbits(48):012x}",
        ),
        journal=journal,
        metrics=metrics,
        clock=clock,
    )
    admin = Admin(
        policy_spec=config.policy,
        roles=frozenset(config.roles),
        policy=policy,
        table=table,
        pool=pool,
        turns=turns,
        index=index,
        arrivals=arrivals,
        backlog=backlog,
        forecast=forecast,
        journal=journal,
        metrics=metrics,
        clock=clock,
    )
    operations = Operations(
        pool, config.roles, config.admin_token or os.environ.get("PPD_ADMIN_TOKEN", "")
    )
    return application(pool, admin, operations, config.max_body_bytes), turns
