"""The workers the router knows: who they are, whether they live, how busy they are.

Owns the handshake and the health probe. Which worker a turn should go to beyond "alive
and least busy" is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from ppd.errors import WorkerError

logger = logging.getLogger("ppd.router.workers")


class Role(StrEnum):
    """SGLang's words, as in ``--disaggregation-mode``."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a worker says of itself (``/server_info`` and ``/v1/models``)."""

    role: str
    models: tuple[str, ...]
    max_model_tokens: int | None
    page_size: int
    bootstrap_port: int
    local_prefill: bool
    boot_id: str | None  # of the plugin's process; None without it
    vocab_size: int | None


@dataclass(slots=True)
class Worker:
    """One worker process behind a URL.

    ``epoch`` counts its restarts as seen from here: a restarted worker has lost its KV, so
    sessions remember ``identity``, not the URL.
    """

    url: str
    role: Role
    handshake: Handshake
    alive: bool = True
    epoch: int = 0
    in_flight: int = 0

    @property
    def identity(self) -> str:
        return f"{self.url}#{self.epoch}"

    @property
    def bootstrap_host(self) -> str:
        host = urlsplit(self.url).hostname
        assert host is not None, "RouterConfig.check admits no URL without a host"
        return host


@dataclass(slots=True)
class WorkerPool:
    """All workers, fixed at start.

    ``control``: for handshakes and probes; with short timeouts, and a connection for each, so
    that none of them meets one that the worker has closed.
    """

    workers: list[Worker]
    control: aiohttp.ClientSession

    def of(self, role: Role) -> list[Worker]:
        return [w for w in self.workers if w.role is role]

    def by_identity(self, identity: str | None) -> Worker | None:
        """The worker of that identity, if it lives and has not restarted since."""
        return next((w for w in self.workers if w.identity == identity and w.alive), None)

    def pick(self, role: Role, prefer: Worker | None) -> Worker:
        """``prefer`` if it lives (its caches are warm), else the least busy one.

        Raises:
            WorkerError: no worker of that role lives.
        """
        if prefer is not None and prefer.alive:
            return prefer
        living = [w for w in self.of(role) if w.alive]
        if not living:
            raise WorkerError(f"no {role} worker is alive")
        return min(living, key=lambda w: w.in_flight)

    @property
    def models(self) -> tuple[str, ...]:
        return self.workers[0].handshake.models

    @property
    def vocab_size(self) -> int | None:
        """Of the one model that all workers serve, if one of them told."""
        return next((w.handshake.vocab_size for w in self.workers if w.handshake.vocab_size), None)

    def mark_dead(self, worker: Worker, why: str) -> None:
        if worker.alive:
            logger.warning("worker down: %s %s (%s)", worker.role, worker.url, why)
            worker.alive = False

    async def probe_forever(self, interval_s: float) -> None:
        """Ask every worker for its health again and again; revive it by a new handshake."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.gather(*(self.check(worker) for worker in self.workers))

    async def check(self, worker: Worker) -> None:
        """Find out now whether a worker lives."""
        try:
            if worker.alive:
                await _check_ready(self.control, worker.url)
                return
            handshake = await shake_hands(self.control, worker.url)
            _check_role(worker.url, worker.role, handshake)
            _check_same_models([*(w for w in self.workers if w is not worker)], handshake)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.mark_dead(worker, describe(error))
        except WorkerError as error:
            logger.warning("worker stays down: %s", error)
        else:
            restarted = handshake.boot_id is None or handshake.boot_id != worker.handshake.boot_id
            worker.handshake, worker.alive = handshake, True
            worker.epoch += restarted
            logger.info(
                "worker up again: %s %s (%s)",
                worker.role,
                worker.url,
                "restarted" if restarted else "the same process",
            )


def describe(error: BaseException) -> str:
    """An error in words; many of aiohttp's and asyncio's have an empty message."""
    return str(error) or type(error).__name__


async def shake_hands(client: aiohttp.ClientSession, url: str) -> Handshake:
    """Ask a worker who it is.

    Raises:
        WorkerError: something answers there, but not an SGLang server.
        aiohttp.ClientError, TimeoutError, OSError: nothing answers.
    """
    try:
        await _check_ready(client, url)
        info = await _get_json(client, f"{url}/server_info")
        models = await _get_json(client, f"{url}/v1/models")
        plugin: dict[str, Any] = info["internal_states"][0].get("ppd") or {}
        cards = models["data"]
        return Handshake(
            role=info["disaggregation_mode"],
            models=tuple(card["id"] for card in cards),
            max_model_tokens=cards[0].get("max_model_len"),
            page_size=int(info["page_size"]),
            bootstrap_port=int(info["disaggregation_bootstrap_port"]),
            local_prefill=bool(plugin.get("local_prefill")),
            boot_id=plugin.get("boot_id"),
            vocab_size=plugin.get("vocab_size"),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error


async def _check_ready(client: aiohttp.ClientSession, url: str) -> None:
    async with client.get(f"{url}/ready") as response:
        if response.status == 503:
            raise aiohttp.ClientError("it is still starting, or shutting down")


async def _get_json(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as response:
        if response.status >= 500:
            raise aiohttp.ClientError(f"{url} answered {response.status}")
        if response.status != 200:
            raise WorkerError(f"{url} answered {response.status}, expected 200")
        return orjson.loads(await response.read())


def _check_role(url: str, role: Role, handshake: Handshake) -> None:
    if handshake.role != role:
        raise WorkerError(
            f"{url} was given as --{role}, but runs with --disaggregation-mode {handshake.role}"
        )


def _check_same_models(others: Iterable[Worker], handshake: Handshake) -> None:
    for other in others:
        if other.handshake.models != handshake.models:
            raise WorkerError(
                f"workers serve different models: {', '.join(other.handshake.models)} on "
                f"{other.url}, {', '.join(handshake.models)} elsewhere"
            )


async def connect(
    control: aiohttp.ClientSession,
    prefill: Iterable[str],
    decode: Iterable[str],
    timeout_s: float,
) -> WorkerPool:
    """Shake hands with all workers, waiting for those that are still starting.

    Raises:
        WorkerError: a worker did not answer in time, or is not what it was given as.
    """
    wanted = [(Role.PREFILL, url) for url in prefill] + [(Role.DECODE, url) for url in decode]
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    shakes = (_connect_one(control, role, url, deadline_s) for role, url in wanted)
    pool = WorkerPool(list(await asyncio.gather(*shakes)), control)
    for worker in pool.workers:
        _check_same_models(pool.workers, worker.handshake)
        if worker.role is Role.DECODE and not worker.handshake.local_prefill:
            logger.warning(
                "decode worker %s does not offer local prefill (start it by ppd-worker, or with "
                "PPD_ENABLE=1 where sglang-ppd is installed): its turns stay remote",
                worker.url,
            )
    return pool


async def _connect_one(
    client: aiohttp.ClientSession, role: Role, url: str, deadline_s: float
) -> Worker:
    loop = asyncio.get_running_loop()
    while True:
        try:
            handshake = await shake_hands(client, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if loop.time() >= deadline_s:
                raise WorkerError(
                    f"{role} worker {url} does not answer ({describe(error)})"
                ) from error
            await asyncio.sleep(min(0.5, max(0.0, deadline_s - loop.time())))
        else:
            _check_role(url, role, handshake)
            return Worker(url, role, handshake)
