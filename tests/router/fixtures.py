"""Workers, requests and decision tables that the tests of decisions share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from eval.fake_worker.request import Script
from eval.fake_worker.worker import FakeWorker
from ppd.contract import Role
from router.workers.group import ModelWorkers
from router.workers.sglang import Handshake
from router.workers.worker import Server
from tests.unit.fixtures import table_record
from tests.waiting import HANG_S

from .scripts import answering

CHAT = "/v1/chat/completions"
LATER = ("hello", "www", "and")


def local_unless_long(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    """Saves half of TTFT, loses a tenth of TPOT; for long inputs it loses everything."""
    return (100.0, 10.0, 50.0, 11.0) if n == 0 else (100.0, 10.0, 200.0, 20.0)


def always_remote(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    return (100.0, 10.0, 200.0, 20.0)


def write_table(path: Path, costs: Any, **fields: Any) -> Path:
    path.write_bytes(msgspec.json.encode(table_record(costs, **fields)))
    return path


def workers(script: Script | None = None) -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("prefill", answering()), FakeWorker(
        "decode", script or answering(prompt=100, cached=96)
    )


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": "fake", "messages": messages, **fields}


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await holds():
            pass  # each look is a round trip


def model_workers(**counts: int) -> ModelWorkers:
    """So many workers of each role and one model, which nobody has to reach."""
    shake = Handshake("decode", ("m",), None, 16, 1, True, None, None)
    made = ModelWorkers()
    for role, count in counts.items():
        for i in range(count):
            for worker in Server(f"http://{role}{i}:1", Role[role.upper()], shake).ranks:
                made.join(worker)
    return made


@asynccontextmanager
async def serving(*engines: FakeWorker) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.serving())
        yield
