"""Two models on fake workers, behind one router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from eval.fake_worker.request import Script
from eval.fake_worker.worker import FakeWorker
from router.config.models import ModelOptions

from ..conftest import Client, Cluster
from ..scripts import answering

NAMES = ("red", "blue")
BOTH = {name: ModelOptions() for name in NAMES}
_SCRIPT = answering(prompt=100, cached=96)


@dataclass(slots=True)
class Pair:
    """A prefill and a decode worker of each model, and a client of their router."""

    client: Client
    prefill: dict[str, FakeWorker]
    decode: dict[str, FakeWorker]


class TwoModels(Protocol):
    """``async with two_models(options) as pair``: workers and router, running."""

    def __call__(
        self, *, scripts: dict[str, Script] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Pair]: ...


def worker(role: str, model: str, script: Script | None = None, **more: Any) -> FakeWorker:
    return FakeWorker(role, script=script or _SCRIPT, model=model, **more)


@pytest.fixture
def two_models(cluster: Cluster) -> TwoModels:
    @asynccontextmanager
    async def start(
        *,
        scripts: dict[str, Script] | None = None,
        adapters: dict[str, tuple[str, ...]] | None = None,
        **options: Any,
    ) -> AsyncIterator[Pair]:
        scripts, adapters = scripts or {}, adapters or {}
        prefill, decode = {}, {}
        for name in NAMES:
            own = adapters.get(name, ())
            prefill[name] = worker("prefill", name, adapters=own)
            decode[name] = worker("decode", name, scripts.get(name), adapters=own)
        workers = (*prefill.values(), *decode.values())
        async with cluster(*workers, **{"models": BOTH, **options}) as client:
            yield Pair(client, prefill, decode)

    return start
