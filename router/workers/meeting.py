"""Getting to know a worker: hands are shaken before it gets any work."""

from __future__ import annotations

import asyncio

import aiohttp

from ppd.contract import Role
from ppd.errors import WorkerError

from ..wire.errors import describe
from .handshake import Handshake, shake_hands
from .worker import Worker

_SAYS = {role: role.value for role in Role} | {Role.REPLICA: "null"}  # --disaggregation-mode


def _check_role(url: str, role: Role, handshake: Handshake) -> None:
    if handshake.role != _SAYS[role]:
        raise WorkerError(
            f"{url} was given as a {role} worker, but runs with --disaggregation-mode "
            f"{handshake.role}"
        )


async def meet(control: aiohttp.ClientSession, role: Role, url: str) -> Worker:
    """Shake hands once.

    Raises:
        WorkerError: it is not what it was given as.
        aiohttp.ClientError, TimeoutError, OSError: it does not answer.
    """
    handshake = await shake_hands(control, url)
    _check_role(url, role, handshake)
    return Worker(url, role, handshake)


async def meet_by(client: aiohttp.ClientSession, role: Role, url: str, deadline_s: float) -> Worker:
    """Shake hands with one that may still be starting.

    Args:
        deadline_s: by the event loop's clock.

    Raises:
        WorkerError: it did not answer in time, or is not what it was given as.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await meet(client, role, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if loop.time() >= deadline_s:
                raise WorkerError(
                    f"{role} worker {url} does not answer ({describe(error)})"
                ) from error
            await asyncio.sleep(min(0.5, max(0.0, deadline_s - loop.time())))
