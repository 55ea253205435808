"""The aiohttp application: routes, error answers, start and stop."""

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
from ppd.errors import ConfigError, RequestError, WorkerError
from ppd.forecast import Forecast
from ppd.journal import VERSION as JOURNAL_VERSION
from ppd.journal import Opened
from ppd.judge import Judge
from ppd.sessions import SessionIndex

from .admin import Admin
from .config import RouterConfig
from .dispatch import Dispatcher
from .journal import Journal
from .ledger import Ledger
from .legs import LegFailed
from .membership import Membership
from .metrics import Metrics
from .requests import Endpoint
from .tables import TableFile, make_policy
from .turns import TurnServer
from .wishes import WishBook
from .workers import WorkerPool, connect

logger = logging.getLogger("ppd.router")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_INVALID = "invalid_request_error"  # OpenAI's type of a client's error

_POOL = web.AppKey("pool", WorkerPool)
_TURNS = web.AppKey("turns", TurnServer)
_METRICS = web.AppKey("metrics", Metrics)


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
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=config.connect_timeout_s, sock_read=config.idle_timeout_s
    )
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0), timeout=timeout
        ) as client,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=5.0),
        ) as control,
    ):
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
                async with serving(lobby(membership), listener.dup()):
                    await membership.complete()
            table: TableFile | None = None
            if policy is None:
                policy, table = make_policy(config, pool.models, pool.shape)
            journal = open_journal(config, table)
            stack.callback(journal.close)
            await stack.enter_async_context(owned(pool.probe_forever(config.probe_interval_s)))
            app = make_app(config, policy, table, pool, journal, client)
            if config.accept_workers:
                membership.add_routes(app)
                await stack.enter_async_context(owned(membership.watch_forever()))
            await stack.enter_async_context(serving(app, listener))
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
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=10.0)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


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
        return _error(503, "no workers have announced themselves yet", "worker_error")

    app = web.Application(middlewares=[_answer_errors])
    membership.add_routes(app)
    app.router.add_route("*", "/{path:.*}", refuse)
    app[_METRICS] = Metrics()
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
    client: aiohttp.ClientSession,
) -> web.Application:
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
            client=client,
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
    app[_POOL], app[_TURNS], app[_METRICS] = pool, turns, metrics
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
    for endpoint in Endpoint:
        app.router.add_post(endpoint, _turn_handler(endpoint))
    app.router.add_get("/v1/models", _models)
    return app


def _turn_handler(endpoint: Endpoint) -> _Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await request.app[_TURNS].serve(request, endpoint)

    return handler


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
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error as OpenAI's error object."""
    try:
        return await handler(request)
    except RequestError as error:
        _count(request, "rejected")
        return _error(error.status, str(error), _INVALID, error.param, error.code)
    except LegFailed as failure:
        _count(request, failure.outcome)
        kind = _INVALID if failure.outcome == "rejected" else failure.error.kind
        return _error(failure.error.status, failure.error.message, kind)
    except WorkerError as error:
        _count(request, "worker_error")
        return _error(503, str(error), "worker_error")
    except web.HTTPRequestEntityTooLarge as error:
        _count(request, "rejected")
        return _error(413, f"the body is too large: {error.text}", _INVALID)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, f"{request.method} {request.path}: use {allowed}", _INVALID)
    except web.HTTPNotFound:
        paths = ", ".join(sorted({r.canonical for r in request.app.router.resources()}))
        return _error(404, f"no such path: {request.path}; there are {paths}", _INVALID)
    except web.RequestPayloadError as error:
        _count(request, "rejected")
        return _error(400, f"the body cannot be read: {error}", _INVALID)
    except Exception as error:  # the process edge: a bug of ours must not cost the connection
        logger.exception("%s %s failed", request.method, request.path)
        _count(request, "internal_error")
        return _error(500, f"internal error of the router ({type(error).__name__})", "router_error")


def _count(request: web.Request, outcome: str) -> None:
    request.app[_METRICS].finished.labels(request.path, outcome).inc()


def _error(
    status: int, message: str, kind: str, param: str | None = None, code: str | None = None
) -> web.Response:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return web.json_response({"error": error}, status=status)
