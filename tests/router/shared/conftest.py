"""A real Valkey or Redis server, started and killed by each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from eval.store_server import StoreServer, program
from router.config.shared import SharedConfig

NewServer = Callable[..., StoreServer]


@pytest.fixture
def new_server(tmp_path: Path) -> NewServer:
    """Make a server that is not started; its arguments are options of its command line."""
    path = program()
    if path is None:
        pytest.skip("neither valkey-server nor redis-server is installed (make system)")

    def make(*options: str) -> StoreServer:
        return StoreServer(path, tmp_path, options=options)

    return make


@pytest.fixture
async def server(new_server: NewServer) -> AsyncIterator[StoreServer]:
    """A server that runs."""
    async with new_server().running() as one:
        yield one


def shared(server: StoreServer, **options: object) -> SharedConfig:
    """Return the options of a router that shares by a server."""
    # A machine that stalls is no timeout: a test of timeouts sets its own.
    fields: dict[str, object] = {"url": server.url, "timeout_ms": 5_000.0, **options}
    return SharedConfig(**fields)  # type: ignore[arg-type]
