"""Pods as workers: they join and leave, also when the API server fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eval.fake_worker.worker import FakeWorker
from ppd.contract import Role
from ppd.errors import ConfigError
from router.config.kubernetes import Kubernetes
from router.config.options import RouterConfig
from router.server.run import running
from router.workers.kubernetes import Pods, access
from router.workers.pods import Pod

from ..conftest import Client, Cluster
from ..fixtures import until, workers
from ..scripts import answering
from .fake_kubernetes import FakeKubernetes, pod_object

ROLES = (Role.PREFILL, Role.DECODE)
SELECTORS = {"prefill": "role=prefill", "decode": "role=decode"}


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes().serving() as api:
        yield api


def options(api: FakeKubernetes, folder: Path, **changes: Any) -> Kubernetes:
    given = {"namespace": "models", "port": "http", **SELECTORS, **changes}
    return Kubernetes(kubeconfig=api.kubeconfig(folder), **given)


@asynccontextmanager
async def following(
    api: FakeKubernetes, cluster: Cluster, folder: Path, *engines: FakeWorker
) -> AsyncIterator[Client]:
    """A router whose workers are the pods of ``api``; worker ``i`` is ``pod-i``."""
    async with AsyncExitStack() as stack:
        for number, engine in enumerate(engines):
            await stack.enter_async_context(engine.serving())
            await api.put(f"pod-{number}", engine.role, engine.url)
        found = {"kubernetes": options(api, folder), "discovery_interval_s": 0.01}
        client = await stack.enter_async_context(cluster(**found))
        await until(lambda: shows(client, *engines))
        yield client


async def shows(client: Client, *engines: FakeWorker) -> bool:
    return set(await client.workers()) == {engine.url for engine in engines}


async def test_ready_pods_join_and_others_leave(
    api: FakeKubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    p, d = workers()
    others = [FakeWorker("decode", answering()) for _ in range(2)]
    async with following(api, cluster, tmp_path, p, d, *others) as client:
        assert (await client.chat("hello")).status == 200
        await api.put("pod-1", "decode", d.url, ready=False)
        await until(lambda: shows(client, p, *others))
        await api.put("pod-1", "decode", d.url)
        await until(lambda: shows(client, p, d, *others))
        await api.put("pod-2", "decode", others[0].url, ending=True)
        await api.delete("pod-3")
        await until(lambda: shows(client, p, d))
        await api.put("pod-9", "decode", others[1].url)
        await until(lambda: shows(client, p, d, others[1]))
        assert (await client.chat("hello")).status == 200


async def test_pods_are_listed_again_after_a_version_expires(
    api: FakeKubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering())
    async with following(api, cluster, tmp_path, p, d, other) as client:
        await until(lambda: watched(api, 2))
        await api.put("pod-1", "decode", d.url)  # then versions are no longer those of the list
        await api.put("pod-0", "prefill", p.url)
        await api.bookmark()
        await until(lambda: shows(client, p, d, other))
        before = api.requests.count("list")
        await api.expire()
        await api.delete("pod-2")
        await until(lambda: shows(client, p, d))
        assert api.requests.count("list") > before


async def watched(api: FakeKubernetes, times: int) -> bool:
    await asyncio.sleep(0)
    return sum(one.startswith("watch") for one in api.requests) >= times


async def test_a_broken_watch_continues_at_the_last_version(
    api: FakeKubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    p, d = workers()
    others = [FakeWorker("decode", answering()) for _ in range(2)]
    async with following(api, cluster, tmp_path, p, d) as client, AsyncExitStack() as stack:
        for number, engine in enumerate(others):
            await stack.enter_async_context(engine.serving())
            await until(lambda: watched(api, 2))
            before = api.version
            await api.put(f"other-{number}", "decode", engine.url)
            await until(partial(shows, client, p, d, *others[: number + 1]))
            api.hang_up()
        assert api.requests.count("list") == 2, "one for each role, at the start"
        assert f"watch {before}" in api.requests, "the first other's version"


async def test_a_refusal_is_logged_once_and_changes_nothing(
    api: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    published: asyncio.Queue[set[str]] = asyncio.Queue()
    tries: asyncio.Queue[float] = asyncio.Queue()
    only = options(api, tmp_path, prefill="")
    pods = Pods(only, ROLES, await access(only.kubeconfig), sleep=tries.put, jitter=lambda: 1.0)
    await api.put("a", "decode", "http://10.0.0.1:1")
    following = asyncio.create_task(pods.watch(lambda workers: published.put_nowait(set(workers))))
    assert await published.get() == {"http://10.0.0.1:1"}
    await until(lambda: watched(api, 1))
    api.refusal = 403
    api.hang_up()
    for _ in range(6):
        await tries.get()
    api.refusal = None
    await api.put("b", "decode", "http://10.0.0.2:1")
    assert await published.get() == {"http://10.0.0.1:1", "http://10.0.0.2:1"}

    async def is_well() -> bool:
        await asyncio.sleep(0)
        return "decode pods are watched again" in caplog.text

    await until(is_well)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert caplog.text.count("the API server answered 403: pods is forbidden") == 1


class StopTestError(BaseException):
    """Ends a source that runs for ever."""


async def wait_times_of(durations_s: list[float]) -> list[float]:
    """The seconds between retries, if the requests fail after ``durations_s`` seconds."""
    wait_times_s: list[float] = []
    remaining_s = iter(durations_s)
    now_s = 0.0

    class FailingApi:
        async def list_namespaced_pod(self, *_: Any, **__: Any) -> None:
            nonlocal now_s
            now_s += next(remaining_s)
            raise OSError("the connection broke")

    @asynccontextmanager
    async def connect() -> AsyncIterator[FailingApi]:
        yield FailingApi()

    async def sleep(seconds: float) -> None:
        wait_times_s.append(seconds)
        if len(wait_times_s) == len(durations_s):
            raise StopTestError

    only = Kubernetes(namespace="models", decode="role=decode")
    pods = Pods(only, ROLES, connect, clock=lambda: now_s, sleep=sleep, jitter=lambda: 1.0)
    with pytest.raises(BaseExceptionGroup):
        await pods.watch(lambda workers: None)
    return wait_times_s


async def test_retries_back_off_exponentially() -> None:
    assert await wait_times_of([0.0] * 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


async def test_a_long_watch_resets_the_backoff() -> None:
    assert await wait_times_of([0.0, 0.0, 100.0, 0.0]) == [0.5, 1, 0.5, 1]


def pod(**state: Any) -> Pod:
    return msgspec.convert(pod_object("a", "decode", "http://10.0.0.7:30000", **state), Pod)


def test_ready_pods() -> None:
    assert pod().ready
    assert not pod(ready=False).ready
    assert not pod(ending=True).ready
    pending = msgspec.convert({"metadata": {"name": "a"}, "status": {"phase": "Pending"}}, Pod)
    assert not pending.ready


def test_the_url_of_a_pod() -> None:
    assert pod().url("http") == "http://10.0.0.7:30000"
    assert pod().url(8000) == "http://10.0.0.7:8000"
    assert pod(port="api").url("http") is None
    published = pod_object("a", "decode", "http://10.0.0.7:30000")
    published["status"]["podIP"] = "fd00::7"
    assert msgspec.convert(published, Pod).url("http") == "http://[fd00::7]:30000"


async def test_a_pod_without_the_port_is_logged_once(
    api: FakeKubernetes, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = workers()
    other = FakeWorker("decode", answering())
    async with following(api, cluster, tmp_path, p, d) as client, other.serving():
        for _ in range(3):
            await api.put("odd", "decode", "http://127.0.0.1:1", port="api")
        await api.put("pod-2", "decode", other.url)
        await until(lambda: shows(client, p, d, other))
    assert caplog.text.count("pod odd has no port named 'http'") == 1


@pytest.mark.parametrize(
    ("kubeconfig", "named"), [("nowhere", "no kubeconfig"), ("wrong", "no way to reach a cluster")]
)
async def test_a_router_that_cannot_reach_a_cluster_does_not_start(
    tmp_path: Path, kubeconfig: str, named: str
) -> None:
    write_wrong(tmp_path / "wrong")
    found = Kubernetes(namespace="n", kubeconfig=str(tmp_path / kubeconfig), **SELECTORS)
    with pytest.raises(ConfigError, match=named):
        async with running(RouterConfig(port=0, policy="full", kubernetes=found)):
            raise AssertionError("the router has started")


def write_wrong(path: Path) -> None:
    path.write_text("apiVersion: v1\ncurrent-context: none\ncontexts: []\n")


async def test_a_service_account_without_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="Service token file does not exist"):
        await Pods.open(Kubernetes(namespace="n", **SELECTORS), ROLES)


async def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[k8s\]'"):
        await Pods.open(Kubernetes(namespace="n", **SELECTORS), ROLES)


def test_a_router_without_pods_does_not_import_it() -> None:
    look = "import router.cli, sys; sys.exit('kubernetes_asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)
