"""HTTP requests to one worker: its properties, its readiness, its load.

The paths and the format of the answers are in ``sglang.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from ppd.contract import Role
from ppd.errors import WorkerError

from ..wire.errors import describe
from .sglang import (
    INFO_PATH,
    LOADS_PATH,
    LOADS_QUERY,
    MODELS_PATH,
    READY_PATH,
    Handshake,
    Load,
    check_role,
    handshake_of,
    loads_of,
)
from .worker import Server

logger = logging.getLogger("ppd.router.workers")

_REDIRECTS = range(300, 400)  # not followed: they would lead out of the workers' networks


async def shake_hands(client: aiohttp.ClientSession, url: str) -> Handshake:
    """Request a worker's properties.

    Raises:
        WorkerError: the server at ``url`` is not an SGLang server.
        aiohttp.ClientError, TimeoutError, OSError: no server answers, or it is not ready.
    """
    await check_ready(client, url)
    info = await _get_json(client, url + INFO_PATH)
    return handshake_of(url, info, await _get_json(client, url + MODELS_PATH))


async def connect_server(client: aiohttp.ClientSession, role: Role, url: str) -> Server:
    """Perform the handshake once, and return the server.

    Raises:
        WorkerError: the server is not an SGLang server, or runs in another role.
        aiohttp.ClientError, TimeoutError, OSError: no server answers, or it is not ready.
    """
    handshake = await shake_hands(client, url)
    check_role(url, role, handshake)
    return Server(url, role, handshake)


async def await_server(
    client: aiohttp.ClientSession, role: Role, url: str, deadline_s: float
) -> Server:
    """Retry the handshake until a server that may still be starting answers.

    Args:
        client: a session with short timeouts.
        role: the role that the server must have.
        url: its base URL.
        deadline_s: end of the retries, by the event loop's clock.

    Raises:
        WorkerError: the worker did not answer in time, or is not what the router needs.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await connect_server(client, role, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if loop.time() >= deadline_s:
                raise WorkerError(
                    f"{role} worker {url} does not answer ({describe(error)})"
                ) from error
            await asyncio.sleep(min(0.5, max(0.0, deadline_s - loop.time())))


async def check_ready(client: aiohttp.ClientSession, url: str) -> None:
    """Check that a worker accepts requests.

    Raises:
        aiohttp.ClientError: it does not; with status 503 it is starting or shutting down.
    """
    async with client.get(url + READY_PATH, allow_redirects=False) as response:
        if response.status >= 500 or response.status in _REDIRECTS:
            raise aiohttp.ClientError(
                f"it is not ready: {url}{READY_PATH} answered {response.status}"
            )


async def fetch_loads(
    client: aiohttp.ClientSession, url: str, previous: Sequence[Load | None]
) -> Sequence[Load | None]:
    """Request the load of a decode server's ranks; None for each if it reports none.

    Args:
        client: a session with short timeouts.
        url: base URL of the server.
        previous: the previous report of each rank; None for the first one.
    """
    try:
        async with client.get(
            url + LOADS_PATH, params=LOADS_QUERY, allow_redirects=False
        ) as response:
            if response.status != 200:
                return [None] * len(previous)
            return loads_of(orjson.loads(await response.read()), previous)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        # At level info: the worker may serve requests all the same.
        logger.info("%s%s: %s", url, LOADS_PATH, describe(error))
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("%s%s: unexpected answer (%r)", url, LOADS_PATH, error)
    return [None] * len(previous)


async def _get_json(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url, allow_redirects=False) as response:
        if response.status >= 500:
            raise aiohttp.ClientError(f"{url} answered {response.status}")
        if response.status != 200:
            raise WorkerError(f"{url} answered {response.status}, expected 200")
        body = await response.read()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error
