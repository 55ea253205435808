"""Real SGLang workers on this machine's CPU, started once a session.

The engine checks its own pools whenever it is idle and dies of a leak
(``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE``), so a worker that still serves at the end of a
test has not leaked; ``Workers.settle`` waits for that moment and empties the caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eval import tiny_model
from eval.cluster import Launcher, Process, launching, wait_all
from eval.tiny_model import Family, ModelSpec, Vocabulary
from ppd.contract import Role
from ppd.decision import Policy
from router.config.limits import AdmissionLimits
from router.config.options import RouterConfig
from router.server.run import running

BPE = ModelSpec(vocabulary=Vocabulary.BPE)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(300))


@dataclass(frozen=True, slots=True)
class Workers:
    prefill: Process
    decode: Process
    monolithic: Process | None
    page_size: int
    model: Path

    @asynccontextmanager
    async def routed(self, policy: Policy) -> AsyncIterator[str]:
        """A router in this process before these workers; gives its URL."""
        config = RouterConfig(
            prefill=(self.prefill.url,),
            decode=(self.decode.url,),
            port=0,
            # Else the router would keep from the engine the shortages that are tested here.
            admission=AdmissionLimits(kv_headroom=False),
        )
        async with running(config, policy) as url:
            yield url

    async def settle(self, http: aiohttp.ClientSession) -> None:
        """Wait until no worker has anything to do, and empty all caches.

        A cache is emptied only by a server that is idle in every queue, and its pools
        must be exactly full then.
        """
        for worker in (self.prefill, self.decode, self.monolithic):
            if worker is None:
                continue
            while True:
                async with http.post(f"{worker.url}/flush_cache") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.05)
            while (await load_of(http, worker))["num_used_tokens"]:  # published a step later
                assert worker.popen.poll() is None, f"{worker.name} died{worker.tail()}"


async def load_of(http: aiohttp.ClientSession, worker: Process) -> dict[str, Any]:
    async with http.get(f"{worker.url}/v1/loads") as answer:
        loads: list[dict[str, Any]] = (await answer.json())["loads"]
    return loads[0]


async def queues_of(http: aiohttp.ClientSession, worker: Process) -> dict[str, int]:
    """How many requests wait in upstream's queues of a decode worker."""
    queues: dict[str, int] = (await load_of(http, worker))["disaggregation"]
    return queues


async def plugin_state(http: aiohttp.ClientSession, worker: Process) -> dict[str, Any]:
    async with http.get(f"{worker.url}/server_info") as answer:
        state: dict[str, Any] = (await answer.json())["internal_states"][0]["ppd"]
    return state


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with launching(tmp_path_factory.mktemp("workers")) as launch:
        launch.environment |= STRICT
        yield launch


def start(spec: ModelSpec, logs: Path, page_size: int, *, monolithic: bool) -> Iterator[Workers]:
    model = tiny_model.ensure(spec)
    with launching(logs) as launch:
        launch.environment |= STRICT
        flags = ("--page-size", str(page_size))
        prefill = launch.worker(Role.PREFILL, model, *flags)
        decode = launch.worker(Role.DECODE, model, *flags)
        alone = launch.worker(Role.REPLICA, model, *flags) if monolithic else None
        wait_all(launch.started)
        yield Workers(prefill, decode, alone, page_size, model)


@pytest.fixture(scope="session", params=[1, 16], ids=["llama-page1", "qwen3-page16"])
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """Prefill, decode and a monolithic server of a model whose text round-trips."""
    family = Family.LLAMA if request.param == 1 else Family.QWEN3
    logs = tmp_path_factory.mktemp(f"page{request.param}")
    yield from start(ModelSpec(family=family), logs, request.param, monolithic=True)


@pytest.fixture(scope="session")
def bpe_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Prefill and decode of a model whose replies tokenize differently than they were made."""
    yield from start(BPE, tmp_path_factory.mktemp("bpe"), 1, monolithic=False)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
