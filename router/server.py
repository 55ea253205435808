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
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
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
from .answers import ErrorAnswer, answer_to
from .config import RouterConfig
from .dispatch import Dispatcher
from .journal import Journal
from .ledger import Ledger
from .membership import Membership
from .metrics import Metrics
from .requests import Endpoint
from .tables import TableFile, make_policy
from .turns import TurnServer
from .wire.client import Upstreams
from .wire.request import Refusal, Request
from .wire.server import Handler, Limits, WireServer
from .wishes import WishBook
from .workers import WorkerPool, connect

logger = logging.getLogger("ppd.router")

_AdminHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_POOL = web.AppKey("pool", WorkerPool)

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
            pool = await connect(control, urls, config.startup_timeout_s)
            membership = Membership(
                pool,
                roles=config.roles,
                token=config.worker_token or os.environ.get("PPD_WORKER_TOKEN", ""),
                budget_s=config.heartbeat_budget_s,
                clock=time.monotonic,
            )
            if config.accept_workers:
                membership.warn_if_open(config.host)
                async with serving(lobby(membership), None, listener.dup(), config):
                    await membership.complete()
            table: TableFile | None = None
            if policy is None:
                policy, table = make_policy(config, pool.models, pool.shape)
            journal = open_journal(config, table)
            stack.callback(journal.close)
            await stack.enter_async_context(owned(pool.probe_forever(config.probe_interval_s)))
            upstreams = Upstreams(
                connect_s=config.connect_timeout_s,
                silence_s=config.idle_timeout_s,
                keep_s=_KEEP_S,
                tls=None,
            )
            stack.push_async_callback(upstreams.close)
            app, turns = make_app(config, policy, table, pool, journal, upstreams)
            if config.accept_workers:
                membership.add_routes(app)
                await stack.enter_async_context(owned(membership.watch_forever()))
            await stack.enter_async_context(serving(app, turns.serve, listener, config))
            host, port = listener.getsockname()[:2]
            yield f"http://{host}:{port}"


def bind(config: RouterConfig) -> socket.socket:
    """Takes the address; nobody can connect before it is served.

    Raises:
    ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return listener


@asynccontextmanager
async def serving(
    app: web.Application, handler: Handler | None, listener: socket.socket, config: RouterConfig
) -> AsyncIterator[None]:
    """
    Args:
        handler: of the token path; None: ``app`` answers there too.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    assert runner.server is not None
    server = WireServer(
        paths=() if handler is None else tuple(Endpoint),
        handler=handler or _nobody,
        elsewhere=runner.server,
        refusal_body=refusal_body,
        limits=Limits(body_bytes=config.max_body_bytes),
    )
    try:
        await server.start(listener)
        yield
    finally:
        await server.stop(_GRACE_S)
        await runner.cleanup()


async def _nobody(request: Request) -> None:
    raise AssertionError("no path is served here")


def refusal_body(refusal: Refusal) -> bytes:
    return ErrorAnswer(refusal.status, refusal.message).body


@asynccontextmanager
async def owned(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """``work`` goes on while the context is open."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def lobby(membership: Membership) -> web.Application:
    """What is served until there is a worker of each role: only they are let in."""

    async def refuse(request: web.Request) -> web.Response:
        told = ErrorAnswer(503, "no workers have announced themselves yet", "worker_error")
        return _response(told)

    app = web.Application(middlewares=[_answer_errors])
    membership.add_routes(app)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app


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


def make_app(
    config: RouterConfig,
    policy: Policy,
    table: TableFile | None,
    pool: WorkerPool,
    journal: Journal,
    upstreams: Upstreams,
) -> tuple[web.Application, TurnServer]:
    """The application for operators, and what serves the token path."""
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_answer_errors])
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
        ),
        ledger=Ledger(
            index=index,
            policy=policy,
            forecast=forecast,
            journal=journal,
            metrics=metrics,
            clock=clock,
            new_session=lambda: uuid.uuid4().hex[:12],
        ),
        journal=journal,
        metrics=metrics,
        clock=clock,
    )
    app[_POOL] = pool
    Admin(
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
    ).add_routes(app)
    app.router.add_get("/v1/models", _models)
    return app, turns


async def _models(request: web.Request) -> web.Response:
    handshake = request.app[_POOL].first
    cards = [
        {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "max_model_len": handshake.max_model_tokens,
        }
        for model in handshake.models
    ]
    return web.json_response({"object": "list", "data": cards})


@web.middleware
async def _answer_errors(request: web.Request, handler: _AdminHandler) -> web.StreamResponse:
    """Every error as OpenAI's error object."""
    where = f"{request.method} {request.path}"
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _response(ErrorAnswer(405, f"{where}: use {allowed}"))
    except web.HTTPNotFound:
        served = {r.canonical for r in request.app.router.resources()} | set(Endpoint)
        told = f"no such path: {request.path}; there are {', '.join(sorted(served))}"
        return _response(ErrorAnswer(404, told))
    except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
        return _response(answer_to(error, where))


def _response(told: ErrorAnswer) -> web.Response:
    return web.Response(status=told.status, body=told.body, content_type="application/json")
