"""A router before fake workers, in this process, on real sockets."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from eval.dialects import DONE
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from ppd.decision import Policy
from router.config.options import RouterConfig
from router.server.run import running

from .fixtures import local_unless_long, write_table

CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@dataclass(slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def route(self) -> tuple[str, str]:
        return self.headers["X-PPD-Route"], self.headers["X-PPD-Reason"]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events' JSON; the last must be ``[DONE]``, and only the last."""
        assert self.body.endswith(DONE)
        parts = self.body.removesuffix(DONE).split(b"\n\n")
        return [orjson.loads(part.removeprefix(b"data: ")) for part in parts if part]


@dataclass(slots=True)
class Client:
    """Talks to a router as a chat client would."""

    url: str
    http: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Reply:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    async def chat(self, *contents: str, **fields: Any) -> Reply:
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": content}
            for i, content in enumerate(contents)
        ]
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)

    async def workers(self) -> dict[str, Any]:
        """What ``GET /workers`` shows, by URL; {} while the router waits for them."""
        async with self.http.get(f"{self.url}/workers") as response:
            known = await response.json()
        return {one["url"]: one for one in known} if response.status == 200 else {}

    async def metric(self, name: str, **labels: str) -> float:
        async with self.http.get(f"{self.url}/metrics") as response:
            text = await response.text()
        inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = f"{name}{{{inside}}}" if labels else name
        for line in text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


Cluster = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def cluster() -> Cluster:
    """``async with cluster(prefill, decode, ...) as client``: workers and router, running."""

    @asynccontextmanager
    async def start(
        *engines: FakeWorker, choosing: Policy | None = None, **options: Any
    ) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            for engine in engines:
                if not engine.port:
                    await stack.enter_async_context(engine.serving())
            config = RouterConfig(
                prefill=tuple(e.url for e in engines if e.role == "prefill"),
                decode=tuple(e.url for e in engines if e.role == "decode"),
                replica=tuple(e.url for e in engines if e.role == "null"),
                **{
                    "port": 0,
                    "policy": "full",
                    "startup_timeout_s": 5.0,
                    "probe_interval_s": 0.05,
                    **options,
                },
            )
            url = await stack.enter_async_context(running(config, choosing))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield Client(url, http)

    return start


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table in which local turns win unless their input is long."""
    return write_table(tmp_path / "table.json", local_unless_long)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return new_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")


def new_certificate(certificate: Path, key: Path) -> tuple[Path, Path]:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate)),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
