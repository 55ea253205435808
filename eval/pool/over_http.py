"""A pool as its clients have it: searches a second over HTTP, and what starting and building take.

Clients share the pool's cores, so what they get is less than what a pool alone could give.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil

from ppd.ann.space import Rows
from ppd.errors import WorkerError

from ..cluster import Process, free_port, launching, script

_PATH = "/v1/collections/bench"
_ITOPK, _LIMIT = 64, 10
_QUERY = struct.Struct("<4sIIIIIf")
_FOR_S = 4.0


@dataclass(frozen=True, slots=True)
class Form:
    """One form of request to a pool.

    Attributes:
        queries: of one request.
        clients: each sends a request when the one before is answered.
    """

    name: str
    kind: str
    queries: int
    clients: int

    def body(self, queries: Rows) -> bytes:
        """Return the body of a request for some queries."""
        if self.kind == "application/json":
            asked = {"vectors": queries, "limit": _LIMIT, "params": {"itopk": _ITOPK}}
            return orjson.dumps(asked, option=orjson.OPT_SERIALIZE_NUMPY)
        head = (b"PPDQ", *queries.shape, _LIMIT, _ITOPK, 0, 0.0)
        return _QUERY.pack(*head) + queries.tobytes()


FORMS = (
    Form("json, one query", "application/json", 1, 16),
    Form("json, 64 queries", "application/json", 64, 4),
    Form("binary, 64 queries", "application/octet-stream", 64, 4),
)


def rows(
    vectors: Rows, queries: Rows, rounds: int, threads: int, logs: Path
) -> Iterator[dict[str, object]]:
    """Yield raw rows; each form's runs are interleaved.

    Raises:
        ClusterError: the pool did not start.
        WorkerError: it refused.
    """
    with tempfile.TemporaryDirectory() as folder, launching(logs) as launch:
        data, port = Path(folder), free_port()
        np.save(data / "rows.npy", vectors)
        command = script("ppd-pool")
        build = [command, "build", str(data / "rows.npy"), str(data / "bench"), "--metric", "l2"]
        subprocess.run([*build, "--threads", f"{threads}"], check=True)
        # As it is without the malloc that the bench gives to all that it compares.
        argv = [
            "env",
            "-u",
            "GLIBC_TUNABLES",
            command,
            "serve",
            "--data",
            str(data),
            "--port",
            str(port),
        ]
        began_s = time.monotonic()
        pool = launch.start("pool", port, argv)
        pool.wait_ready("/health", began_s + 120.0)
        ready_s = time.monotonic() - began_s
        yield {"what": "start", "ready_s": ready_s, "n": vectors.shape[0], **_memory_mb(pool)}
        for number in range(rounds):
            for form in FORMS:
                qps = asyncio.run(_drive(pool.url, form, queries))
                yield {"what": "http", "form": form.name, "round": number, "qps": qps}
        began_s = time.monotonic()
        asyncio.run(_post(pool.url + f"{_PATH}/rebuild", b"", "application/json"))
        took_s = time.monotonic() - began_s
        yield {"what": "rebuild", "seconds": took_s, "n": vectors.shape[0], **_memory_mb(pool)}


async def _drive(url: str, form: Form, queries: Rows) -> float:
    """Searches a second."""
    until_s = time.monotonic() + _FOR_S
    answered = 0

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        at = number * form.queries
        while time.monotonic() < until_s:
            some = queries[np.arange(at, at + form.queries) % queries.shape[0]]
            at += form.clients * form.queries
            await _send(http, f"{url}{_PATH}/search", form.body(some), form.kind)
            answered += form.queries

    began_s = time.monotonic()
    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one(http, number) for number in range(form.clients)))
    return answered / (time.monotonic() - began_s)


async def _post(url: str, body: bytes, kind: str) -> None:
    async with aiohttp.ClientSession() as http:
        await _send(http, url, body, kind)


async def _send(http: aiohttp.ClientSession, url: str, body: bytes, kind: str) -> None:
    async with http.post(url, data=body, headers={"Content-Type": kind}) as response:
        raw = await response.read()
    if response.status != 200:
        raise WorkerError(f"{url}: {response.status} {raw[:200]!r}")


def _memory_mb(pool: Process) -> dict[str, float]:
    """Now, and the most it has been since it started."""
    process = psutil.Process(pool.popen.pid)
    status = Path(f"/proc/{process.pid}/status").read_text()
    most = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"mb": process.memory_info().rss / 1e6, "most_mb": float(most.split()[1]) * 1024 / 1e6}
