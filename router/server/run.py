"""The life of a router process, from start to stop.

``router.wire`` serves the token path. An aiohttp application serves all other paths on the same
address.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import aiohttp

from ppd import __version__
from ppd.contract import Role
from ppd.decision import Policy
from ppd.errors import ConfigError, WorkerError
from ppd.extras import install

from ..admin.admin import Admin
from ..admin.app import admin_app, public_app, startup_app
from ..admin.peer_state import fetch_changes
from ..apis import passthrough, response_store
from ..apis.front import PATHS
from ..config.options import RouterConfig, Secrets
from ..gateway.routing import Routing
from ..observability.journal import Journal, opened_by
from ..observability.metrics import Metrics
from ..observability.tracing import Tracing
from ..peers import Peers, forwarding_to_peers
from ..wire.client import Upstreams
from ..workers.breaker import Breaker
from ..workers.discovery import Reconciler, first_of_each, open_sources
from ..workers.kv_events import kv_event_subscriptions
from ..workers.membership import Membership
from ..workers.registry import WorkerRegistry, connect
from ..workers.worker import Worker
from .build import build
from .listening import bind, serving, tls_of, url_of
from .models import make_policies, tables_of
from .parts import make_parts
from .sharing import sharing
from .tasks import background_task

logger = logging.getLogger("ppd.router")


async def serve(
    config: RouterConfig, read: Callable[[], RouterConfig], peers: Peers | None = None
) -> None:
    """Run a router until SIGTERM or SIGINT; arguments and errors are those of ``running``."""
    stop = asyncio.Event()
    async with running(config, read=read, peers=peers) as url:
        # Until here a signal ends the process at once, also while it waits for workers.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        version = f"{__version__} ({build()})"
        logger.info("sglang-ppd %s: policy %s, listening on %s", version, config.policy, url)
        await stop.wait()
        logger.info("stopping")


@asynccontextmanager
async def running(
    config: RouterConfig,
    policy: Policy | None = None,
    read: Callable[[], RouterConfig] | None = None,
    peers: Peers | None = None,
) -> AsyncIterator[str]:
    """Run a router while the context is open, and yield its base URL.

    Args:
        config: of this process.
        policy: replaces the one that ``config`` names.
        read: returns the present configuration, which SIGHUP applies; None: no reload.
        peers: the other processes on the port, if any.

    Raises:
        ConfigError: the options are wrong, or the address cannot be bound.
        TableError: the decision table is wrong.
        WorkerError: a worker does not respond, or has another role than configured.
    """
    config.check()
    secrets = Secrets.of(config)
    secrets.check(config)
    tls = tls_of(config)
    async with AsyncExitStack() as stack:
        listener = bind(config.host, config.port, shared=config.processes > 1)
        stack.callback(listener.close)
        admin_listener = None
        if config.admin_port is not None:
            admin_listener = bind(config.operators_host, config.admin_port)
            stack.callback(admin_listener.close)
            logger.info("operators and workers: %s", url_of(admin_listener, tls))

        @asynccontextmanager
        async def starting(membership: Membership | None) -> AsyncIterator[None]:
            """Serve what can be served without workers.

            The other processes on the port serve its clients meanwhile.
            """
            async with AsyncExitStack() as waiting:
                if admin_listener is not None:
                    app = startup_app(membership)
                    await waiting.enter_async_context(
                        serving(app, admin_listener.dup(), config, tls=tls)
                    )
                if peers is None:
                    app = startup_app(membership if admin_listener is None else None)
                    await waiting.enter_async_context(serving(app, listener.dup(), config, tls=tls))
                yield

        sources = await open_sources(config)
        control = await stack.enter_async_context(
            _control(secrets.worker_api_key, config.control_timeout_s)
        )
        changes = await fetch_changes(control, peers)
        async with starting(None):
            registry = await connect(
                control,
                {role: changes.urls(role, getattr(config, role)) for role in Role},
                config.startup_timeout_s,
                lambda: Breaker(config.breaker_failures, config.breaker_open_s),
                changes.drained,
                config.model_names,
            )
        membership = None
        if config.accept_workers:
            membership = Membership(
                registry,
                roles=config.roles,
                token=secrets.worker_token,
                networks=config.worker_networks,
                peers=peers,
                budget_s=config.heartbeat_budget_s,
                clock=time.monotonic,
            )
            membership.warn_if_local_only(
                config.host if admin_listener is None else config.operators_host
            )
        if sources:
            reconciler = Reconciler(registry, config.discovery_interval_s)
            await stack.enter_async_context(background_task(reconciler.run(sources)))
        if sources or membership is not None:
            async with starting(membership):
                await first_of_each(registry, config.needed_roles)
        if not registry.servers:
            raise WorkerError("operators have removed every worker: add one before this can serve")
        if not sources and membership is None:
            _check_models(registry, config.roles)
        if policy is None:
            policies = make_policies(config, registry)
        else:
            policies = {model.name: (policy, None) for model in registry.models}
        journal = Journal(config.decision_log, opened_by(config, tables_of(policies)))
        stack.callback(journal.close)
        await stack.enter_async_context(
            background_task(registry.probe_forever(config.probe_interval_s))
        )
        upstreams = Upstreams(
            connect_s=config.connect_timeout_s,
            answer_s=config.answer_timeout_s,
            idle_s=config.idle_timeout_s,
            reuse_s=config.worker_idle_timeout_s,
        )
        stack.push_async_callback(upstreams.close)
        tracing = None
        if config.otlp_endpoint:
            tracing = Tracing(config.otlp_endpoint, config.trace_share)
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        times = aiohttp.ClientTimeout(
            total=config.answer_timeout_s, connect=config.connect_timeout_s
        )
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=times))
        parts = make_parts(
            config,
            policies,
            registry,
            journal,
            upstreams,
            secrets,
            tracing,
            client,
            control,
            peers,
            changes,
        )
        models = parts.admin.models
        if parts.sharing is not None:
            await stack.enter_async_context(sharing(parts.sharing))
        if config.kv_events:

            def metrics_of(worker: Worker) -> Metrics:
                return models[registry.served_by(worker.server).name].metrics

            await stack.enter_async_context(kv_event_subscriptions(registry, metrics_of))
        if config.decode_fallback:
            for model in models.values():
                watching = model.fallbacks.watch_forever(config.probe_interval_s)
                await stack.enter_async_context(background_task(watching))
        if membership is not None:
            await stack.enter_async_context(background_task(membership.watch_forever()))
        if parts.retriever is not None:
            stack.push_async_callback(parts.retriever.close)
        if parts.feedback is not None:
            await stack.enter_async_context(background_task(parts.feedback.run_forever()))
        if parts.answers is not None:
            await stack.enter_async_context(background_task(parts.answers.run_forever()))
        parts.reloader.tls = tls
        parts.reloader.trusted = None if peers is None else peers.tls
        if read is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, parts.reloader.reload, read)
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
            # One that came during the start is applied now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        limit = config.max_body_bytes
        app = admin_app(
            parts.catalog,
            parts.admin,
            parts.operations,
            parts.passthrough,
            parts.stored_responses,
            membership,
            secrets.admin_token,
            peers,
            limit,
            token_paths=PATHS if admin_listener is None else (),
        )
        if peers is not None:
            local_paths = (*passthrough.PASSED_ON, response_store.BY_NAME, response_store.PEER_PATH)
            app.middlewares.append(forwarding_to_peers(control, peers, local_paths))
        if admin_listener is not None:
            await stack.enter_async_context(serving(app, admin_listener, config, tls=tls))
            app = public_app(
                parts.catalog, parts.admin, parts.passthrough, parts.stored_responses, limit
            )
        await stack.enter_async_context(serving(app, listener, config, parts.front, tls))
        if parts.gateway is not None:  # it stops first
            await stack.enter_async_context(_picking(config, parts.gateway))
        stack.push_async_callback(_announce_stop, parts.admin, config.shutdown_delay_s)
        yield url_of(listener, tls)


def _check_models(registry: WorkerRegistry, roles: Collection[Role]) -> None:
    """Check that each of several models has its workers, where no others can be found.

    Raises:
        WorkerError: a model has not.
    """
    for model in registry.models:
        if (missing := model.lacks(roles)) and not model.of(Role.REPLICA) and registry.names:
            raise WorkerError(f"no {' and no '.join(missing)} worker serves {model.name}")


def _picking(config: RouterConfig, routing: Routing) -> AbstractAsyncContextManager[None]:
    """Return the endpoint picker for gateways.

    Raises:
        ConfigError: gRPC or Envoy's messages are not installed.
    """
    try:
        from ..gateway.picker import picking
    except ImportError as error:
        raise ConfigError(
            f"[gateway] needs more packages: {install('gateway')} ({error})"
        ) from error
    return picking(config, routing)


async def _announce_stop(admin: Admin, delay_s: float) -> None:
    """Fail the health check while requests are still served: load balancers need the time."""
    admin.stopping = True
    await asyncio.sleep(delay_s)


def _control(api_key: str, timeout_s: float) -> aiohttp.ClientSession:
    """Return the client session for handshakes, probes and peers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )
