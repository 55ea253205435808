"""A source of workers: the pods of a Kubernetes cluster that have certain labels.

Owns the listing and watching of pods: for each role one list, and then its changes. The library
``kubernetes_asyncio`` gives access to the cluster; it is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ppd.contract import Role
from ppd.errors import ConfigError, PpdError
from ppd.extras import install

from ..config.kubernetes import Kubernetes
from ..wire.errors import describe
from .pods import Event, Failure, Pod, PodList

logger = logging.getLogger("ppd.router.workers")

_WATCH_S = 240  # the API server ends a watch after this time; the next one continues it
_LIST_TIMEOUT_S = 30.0
_MIN_WATCH_S = 1.0  # a watch that ends sooner has failed
_MAX_WAIT_S = 30.0

Connect = Callable[[], AbstractAsyncContextManager[Any]]  # opens a CoreV1Api


class _ApiError(PpdError):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answered {status}: {message}")
        self.status = status


class Pods:
    """A source of workers that watches pods.

    Args:
        options: the namespace, the labels of each role and the port.
        roles: roles that the router's policy uses.
        connect: opens a connection to the cluster.
        clock: seconds, monotonic.
        sleep: waits before a retry, in seconds.
        jitter: random numbers from 0 to 1, which spread the retries of several routers.
    """

    name = "kubernetes"

    def __init__(
        self,
        options: Kubernetes,
        roles: Collection[Role],
        connect: Connect,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._views = [_View(options, role, clock) for role in roles if options.selector(role)]

    @classmethod
    async def open(cls, options: Kubernetes, roles: Collection[Role]) -> Pods:
        """Open the source, with the cluster that the options or the environment name.

        Raises:
            ConfigError: the library is not installed, or no cluster is configured.
        """
        connect = await access(options.kubeconfig)
        return cls(options, roles, connect)

    async def watch(self, publish: Callable[[Mapping[str, Role]], None]) -> None:
        """Call ``publish`` with the roles of all ready pods by URL, on every change."""
        published: dict[str, Role] = {}

        def changed() -> None:
            nonlocal published
            listed = {url: view.role for view in self._views for url in view.collect_urls()}
            if listed != published:
                published = listed
                publish(listed)

        async with asyncio.TaskGroup() as tasks:
            for view in self._views:
                tasks.create_task(self._follow(view, changed))

    async def _follow(self, view: _View, changed: Callable[[], None]) -> None:
        failures = 0
        while True:
            began_s = self._clock()
            try:
                async with self._connect() as api:  # a new one, as credentials may have expired
                    while True:
                        began_s = self._clock()
                        await view.advance(api, changed)
            except Exception as error:  # noqa: BLE001 - credential plugins may raise anything
                failures = 1 if self._clock() - began_s >= _MIN_WATCH_S else failures + 1
                view.failed(describe(error))
            wait_s = min(_MAX_WAIT_S, 0.5 * 2.0 ** min(failures - 1, 10))
            await self._sleep(wait_s * (0.5 + self._jitter() / 2))


class _View:
    """The pods of one role, as last listed and watched."""

    def __init__(self, options: Kubernetes, role: Role, clock: Callable[[], float]) -> None:
        self.role = role
        self._options = options
        self._clock = clock
        self._pods: dict[str, Pod] = {}  # by uid: two pods may have one name in turn
        self._version: str | None = None  # of the last change; None: the pods must be listed
        self._just_listed = False  # whether that version is the list's own
        self._last_error = ""
        self._without_port: set[str] = set()  # uids that were logged

    def collect_urls(self) -> set[str]:
        """Collect the URLs of the ready pods; a pod without the port is logged once."""
        urls: set[str] = set()
        for uid, pod in self._pods.items():
            if not pod.ready:
                continue
            if url := pod.url(self._options.port):
                urls.add(url)
            elif uid not in self._without_port:
                self._without_port.add(uid)
                name, port = pod.metadata.name, self._options.port
                logger.warning("kubernetes: pod %s has no port named %r", name, port)
        return urls

    def failed(self, reason: str) -> None:
        """Record that listing or watching failed; a new reason is logged."""
        if reason != self._last_error:
            logger.warning("kubernetes: %s pods cannot be watched (%s)", self.role, reason)
        self._last_error = reason

    async def advance(self, api: Any, changed: Callable[[], None]) -> None:
        """List the pods, or watch their changes until the API server ends the watch.

        Args:
            api: a ``CoreV1Api``.
            changed: called after every change.

        Raises:
            Exception: the request failed; the pods known so far stay.
        """
        if self._version is None:
            await self._list(api)
            changed()
            return
        began_s = self._clock()
        try:
            await self._watch(api, self._version, changed)
        except _ApiError as error:
            self._version = None
            if error.status != 410 or self._just_listed:
                raise
            return  # the version is too old: the pods are listed again
        if self._clock() - began_s < _MIN_WATCH_S:
            raise ConnectionError("the API server ends the watch as soon as it has begun")

    async def _list(self, api: Any) -> None:
        async with await self._request(
            api, aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        ) as response:
            listed = msgspec.json.decode(await response.read(), type=PodList)
        self._pods = {pod.metadata.uid: pod for pod in listed.items or ()}
        self._version, self._just_listed = listed.metadata.resource_version, True
        self._without_port &= self._pods.keys()

    async def _watch(self, api: Any, version: str, changed: Callable[[], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=_WATCH_S + 30.0, sock_connect=10.0)
        response = await self._request(
            api,
            timeout,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
        )
        async with response:
            if self._last_error:
                logger.info("kubernetes: %s pods are watched again", self.role)
                self._last_error = ""
            async for line in response.content:
                event = msgspec.json.decode(line, type=Event)
                if event.type == "ERROR":
                    failure = msgspec.json.decode(event.object, type=Failure)
                    raise _ApiError(failure.code, failure.message)
                pod = msgspec.json.decode(event.object, type=Pod)
                self._version, self._just_listed = pod.metadata.resource_version, False
                match event.type:
                    case "ADDED" | "MODIFIED":
                        self._pods[pod.metadata.uid] = pod
                    case "DELETED":
                        self._pods.pop(pod.metadata.uid, None)
                changed()

    async def _request(
        self, api: Any, request_timeout: aiohttp.ClientTimeout, **options: Any
    ) -> Any:
        """The unread response to a list or watch request.

        It is decoded here, because the library would build objects for all fields of a pod.
        """
        response = await api.list_namespaced_pod(
            self._options.namespace,
            label_selector=self._options.selector(self.role),
            _preload_content=False,
            _request_timeout=request_timeout,
            **options,
        )
        if response.status == 200:
            return response
        async with response:
            raise _ApiError(response.status, _message(await response.read()))


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=Failure).message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


async def access(kubeconfig: str) -> Connect:
    """A function that opens a connection to the cluster, with new credentials each time.

    Args:
        kubeconfig: path of a kubeconfig file; "" for the pod's service account, or else the
            library's default file.

    Raises:
        ConfigError: the library is not installed, or no cluster is configured.
    """
    try:
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise ConfigError(f"[kubernetes] needs more packages: {install('k8s')}") from error
    in_cluster = _is_in_cluster(kubeconfig)

    async def configure() -> Any:
        configuration = client.Configuration()
        if in_cluster:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=kubeconfig or None,
                client_configuration=configuration,
                persist_config=False,
            )
        return configuration

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        async with client.ApiClient(configuration=await configure()) as api:
            yield client.CoreV1Api(api)

    try:
        await configure()
    except Exception as error:  # of YAML, of files, of programs that the file names
        reason = describe(error)
        raise ConfigError(f"kubernetes: no way to reach a cluster ({reason})") from error
    return connect


def _is_in_cluster(kubeconfig: str) -> bool:
    if kubeconfig and not Path(kubeconfig).is_file():  # the library only logs this
        raise ConfigError(f"kubernetes: no kubeconfig {kubeconfig}")
    return not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
