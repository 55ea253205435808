"""Asks a worker over HTTP: its description, whether it is ready, its load."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import orjson

from ppd.contract import Role
from ppd.errors import WorkerError

from ..wire.errors import describe
from .sglang import Handshake, Load, check_role, handshake_of, load_of
from .worker import Worker

logger = logging.getLogger("ppd.router.workers")


async def shake_hands(client: aiohttp.ClientSession, url: str) -> Handshake:
    """Ask a worker for its description.

    Raises:
        WorkerError: something answers there, but not an SGLang server.
        aiohttp.ClientError, TimeoutError, OSError: nothing answers.
    """
    await check_ready(client, url)
    info = await _get_json(client, f"{url}/server_info")
    return handshake_of(url, info, await _get_json(client, f"{url}/v1/models"))


async def connect_worker(client: aiohttp.ClientSession, role: Role, url: str) -> Worker:
    """Shake hands once, and make the worker.

    Raises:
        WorkerError: it is not what it was given as.
        aiohttp.ClientError, TimeoutError, OSError: it does not answer.
    """
    handshake = await shake_hands(client, url)
    check_role(url, role, handshake)
    return Worker(url, role, handshake)


async def await_worker(
    client: aiohttp.ClientSession, role: Role, url: str, deadline_s: float
) -> Worker:
    """Shake hands with a worker that may still be starting.

    Args:
        deadline_s: by the event loop's clock.

    Raises:
        WorkerError: it did not answer in time, or is not what it was given as.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await connect_worker(client, role, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if loop.time() >= deadline_s:
                raise WorkerError(
                    f"{role} worker {url} does not answer ({describe(error)})"
                ) from error
            await asyncio.sleep(min(0.5, max(0.0, deadline_s - loop.time())))


async def check_ready(client: aiohttp.ClientSession, url: str) -> None:
    """Check that a worker serves.

    Raises:
        aiohttp.ClientError: it does not; with 503 it is still starting, or shutting down.
    """
    async with client.get(f"{url}/ready") as response:
        if response.status >= 500:
            raise aiohttp.ClientError(f"it is not ready: {url}/ready answered {response.status}")


async def ask_load(client: aiohttp.ClientSession, url: str, before: Load | None) -> Load | None:
    """Ask a decode worker for its load; None if it does not report any."""
    try:
        async with client.get(f"{url}/v1/loads", params={"include": "core"}) as response:
            if response.status != 200:
                return None
            return load_of(orjson.loads(await response.read()), before)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.info("%s/v1/loads: %s", url, describe(error))  # it may still serve
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("%s/v1/loads: unexpected answer (%r)", url, error)
    return None


async def _get_json(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as response:
        if response.status >= 500:
            raise aiohttp.ClientError(f"{url} answered {response.status}")
        if response.status != 200:
            raise WorkerError(f"{url} answered {response.status}, expected 200")
        body = await response.read()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error
