"""Pods that are workers, found by their labels.

Owns listing and watching them: one list and then its changes, for each role. Access to the
cluster is the business of ``kubernetes_asyncio``, which is imported when it is needed.
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
from ppd.errors import ConfigError

from ..config.kubernetes import Kubernetes
from ..wire.errors import describe
from .pods import Event, Failure, Pod, PodList

logger = logging.getLogger("ppd.router.workers")

_WATCH_S = 240  # then the API server ends a watch, and the next one goes on from there
_LIST_S = 30.0
_STOOD_S = 1.0  # a watch that ends sooner has failed
_LONGEST_WAIT_S = 30.0

Connect = Callable[[], AbstractAsyncContextManager[Any]]  # gives a CoreV1Api


class _Refused(Exception):
    """The API server did not give what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server says {status}: {message}")
        self.status = status


class Pods:
    """A source of workers.

    Args:
        connect: to the cluster.
        clock: seconds, monotonic.
        sleep, jitter: between two tries; ``jitter`` gives numbers from 0 to 1.
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
        """Raises:
        ConfigError: the library is not installed, or nothing tells how to reach a cluster.
        """
        connect = await access(options.kubeconfig)
        return cls(options, roles, connect)

    async def watch(self, tell: Callable[[Mapping[str, Role]], None]) -> None:
        listed: dict[str, Role] = {}

        def changed() -> None:
            nonlocal listed
            now = {url: view.role for view in self._views for url in view.urls()}
            if now != listed:
                listed = now
                tell(now)

        async with asyncio.TaskGroup() as tasks:
            for view in self._views:
                tasks.create_task(self._follow(view, changed))

    async def _follow(self, view: _View, changed: Callable[[], None]) -> None:
        failures = 0
        while True:
            began_s = self._clock()
            try:
                async with self._connect() as api:  # anew: credentials may have expired
                    while True:
                        began_s = self._clock()
                        await view.advance(api, changed)
            except Exception as error:  # noqa: BLE001 - whatever helps the library to log in
                failures = 1 if self._clock() - began_s >= _STOOD_S else failures + 1
                view.failed(describe(error))
            wait_s = min(_LONGEST_WAIT_S, 0.5 * 2.0 ** min(failures - 1, 10))
            await self._sleep(wait_s * (0.5 + self._jitter() / 2))


class _View:
    """What is known of the pods of one role."""

    def __init__(self, options: Kubernetes, role: Role, clock: Callable[[], float]) -> None:
        self.role = role
        self._options = options
        self._clock = clock
        self._pods: dict[str, Pod] = {}  # by uid: a name may be given again before this is told
        self._version: str | None = None  # that changes are asked from; None: all is asked
        self._fresh = False  # that version is of a list
        self._trouble = ""
        self._without_port: set[str] = set()

    def urls(self) -> set[str]:
        found: set[str] = set()
        for uid, pod in self._pods.items():
            if not pod.ready:
                continue
            if url := pod.url(self._options.port):
                found.add(url)
            elif uid not in self._without_port:
                self._without_port.add(uid)
                name, port = pod.metadata.name, self._options.port
                logger.warning("kubernetes: pod %s has no port named %r", name, port)
        return found

    def failed(self, why: str) -> None:
        if why != self._trouble:
            logger.warning("kubernetes: %s pods cannot be watched (%s)", self.role, why)
        self._trouble = why

    async def advance(self, api: Any, changed: Callable[[], None]) -> None:
        """All pods, if they are not known; else their changes, until the API server ends them.

        Raises:
            Exception: it did not work; what is known stays.
        """
        if self._version is None:
            await self._list(api)
            changed()
            return
        began_s = self._clock()
        try:
            await self._take_changes(api, self._version, changed)
        except _Refused as error:
            self._version = None
            if error.status != 410 or self._fresh:
                raise
            return  # too long ago: all is asked again
        if self._clock() - began_s < _STOOD_S:
            raise ConnectionError("the API server ends the watch as soon as it has begun")

    async def _list(self, api: Any) -> None:
        async with await self._ask(api, aiohttp.ClientTimeout(total=_LIST_S)) as response:
            told = msgspec.json.decode(await response.read(), type=PodList)
        self._pods = {pod.metadata.uid: pod for pod in told.items or ()}
        self._version, self._fresh = told.metadata.resource_version, True
        self._without_port &= self._pods.keys()

    async def _take_changes(self, api: Any, version: str, changed: Callable[[], None]) -> None:
        longest = aiohttp.ClientTimeout(total=_WATCH_S + 30.0, sock_connect=10.0)
        response = await self._ask(
            api,
            longest,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
        )
        async with response:
            if self._trouble:
                logger.info("kubernetes: %s pods are watched again", self.role)
                self._trouble = ""
            async for line in response.content:
                event = msgspec.json.decode(line, type=Event)
                if event.type == "ERROR":
                    failure = msgspec.json.decode(event.object, type=Failure)
                    raise _Refused(failure.code, failure.message)
                pod = msgspec.json.decode(event.object, type=Pod)
                self._version, self._fresh = pod.metadata.resource_version, False
                match event.type:
                    case "ADDED" | "MODIFIED":
                        self._pods[pod.metadata.uid] = pod
                    case "DELETED":
                        self._pods.pop(pod.metadata.uid, None)
                changed()

    async def _ask(self, api: Any, limits: aiohttp.ClientTimeout, **how: Any) -> Any:
        """An answer that is still to be read; the library would make objects of all fields."""
        response = await api.list_namespaced_pod(
            self._options.namespace,
            label_selector=self._options.selector(self.role),
            _preload_content=False,
            _request_timeout=limits,
            **how,
        )
        if response.status == 200:
            return response
        async with response:
            raise _Refused(response.status, _message(await response.read()))


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=Failure).message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


async def access(kubeconfig: str) -> Connect:
    """To a cluster: logged in anew each time.

    Raises:
        ConfigError: the library is not installed, or nothing tells how to reach a cluster.
    """
    try:
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise ConfigError("[kubernetes] needs the extra k8s: sglang-ppd[k8s]") from error
    in_cluster = _is_in_cluster(kubeconfig)

    async def configure() -> Any:
        found = client.Configuration()
        if in_cluster:
            config.load_incluster_config(client_configuration=found)
        else:
            await config.load_kube_config(
                config_file=kubeconfig or None, client_configuration=found, persist_config=False
            )
        return found

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        async with client.ApiClient(configuration=await configure()) as api:
            yield client.CoreV1Api(api)

    try:
        await configure()
    except Exception as error:  # of YAML, of files, of programs that the file names
        told = describe(error)
        raise ConfigError(f"kubernetes: no way to reach a cluster ({told})") from error
    return connect


def _is_in_cluster(kubeconfig: str) -> bool:
    if kubeconfig and not Path(kubeconfig).is_file():  # the library would only log it
        raise ConfigError(f"kubernetes: no kubeconfig {kubeconfig}")
    return not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
