"""Servers that tests start: no connection outlives them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from eval.fake_worker.worker import FakeWorker
from tests.apps import serving_app
from tests.waiting import HANG_S

from .scripts import answering


async def ends(connection: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANG_S):
        try:
            return await loop.sock_recv(connection, 1) == b""
        except ConnectionError:
            return True


def connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setblocking(False)
    return connection


@pytest.mark.parametrize("steps", range(5))
async def test_a_connection_that_is_being_accepted_ends_with_its_worker(steps: int) -> None:
    async with FakeWorker("decode", answering()).serving() as worker:
        connection = connected(worker.port)
        for _ in range(steps):
            await asyncio.sleep(0)
    with connection:
        assert await ends(connection)


@pytest.mark.parametrize("steps", range(5))
async def test_a_connection_that_is_being_accepted_ends_with_its_app(steps: int) -> None:
    async with serving_app(web.Application(), shutdown_timeout=0.05) as url:
        connection = connected(int(url.rsplit(":", 1)[1]))
        for _ in range(steps):
            await asyncio.sleep(0)
    with connection:
        assert await ends(connection)
