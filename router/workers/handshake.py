"""Asking a worker: who it is, whether it is ready, how busy it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from ppd.errors import WorkerError

from ..wire.errors import describe

logger = logging.getLogger("ppd.router.workers")

_ANY_HOST = ("*", "0.0.0.0", "::", "[::]")  # as SGLang tells of where it publishes


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where a worker publishes KV events: a port of its host, and as many behind it as it has
    data-parallel ranks."""

    port: int
    topic: str
    ranks: int


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
    flushes: int = 0  # of its whole KV cache
    kv_token_bytes: int | None = None  # of a token's KV in a transfer, if the plugin tells
    special_tokens: tuple[str, ...] = ()  # of unusual form, if the plugin tells
    publisher: Publisher | None = None  # of KV events
    keeps_sessions: bool = False  # in its radix cache: their names are not the router's to give


@dataclass(frozen=True, slots=True)
class Load:
    """What a decode worker says of its load (``/v1/loads``).

    Attributes:
        running: requests in its batch.
        free_tokens: KV left.
        written_at: its own clock.
    """

    running: int
    free_tokens: int
    written_at: float


async def shake_hands(client: aiohttp.ClientSession, url: str) -> Handshake:
    """Ask a worker who it is.

    Raises:
        WorkerError: something answers there, but not an SGLang server.
        aiohttp.ClientError, TimeoutError, OSError: nothing answers.
    """
    try:
        await check_ready(client, url)
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
            flushes=plugin.get("flushes") or 0,
            kv_token_bytes=plugin.get("kv_token_bytes"),
            special_tokens=tuple(map(str, plugin.get("special_tokens") or ())),
            publisher=_publisher(info, url),
            keeps_sessions=bool(info.get("enable_session_radix_cache")),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkerError(f"{url} is no SGLang server: unexpected answer ({error!r})") from error


def _publisher(info: dict[str, Any], url: str) -> Publisher | None:
    """Only a hint is lost where this cannot be read."""
    told = info.get("kv_events")
    if not told:
        return None
    try:
        if told["publisher"] != "zmq":
            return None
        if told["endpoint_host"] not in _ANY_HOST:  # there SGLang connects, and waits for nobody
            raise ValueError(f"it must bind to *, not to {told['endpoint_host']}")
        return Publisher(int(told["endpoint_port_base"]), str(told["topic"]), int(told["dp_size"]))
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("the KV events that %s tells of cannot be heard: %r", url, error)
        return None


async def check_ready(client: aiohttp.ClientSession, url: str) -> None:
    async with client.get(f"{url}/ready") as response:
        if response.status >= 500:  # 503: it is still starting, or shutting down
            raise aiohttp.ClientError(f"it is not ready: {url}/ready answered {response.status}")


async def _get_json(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as response:
        if response.status >= 500:
            raise aiohttp.ClientError(f"{url} answered {response.status}")
        if response.status != 200:
            raise WorkerError(f"{url} answered {response.status}, expected 200")
        return orjson.loads(await response.read())


async def ask_load(client: aiohttp.ClientSession, url: str, before: Load | None) -> Load | None:
    """How busy a decode worker is; None if it does not tell.

    SGLang 0.5.21 writes its load when it takes a step, and takes none when it is idle: what it
    has not written again since ``before`` is of a batch that has ended.
    """
    try:
        async with client.get(f"{url}/v1/loads", params={"include": "core"}) as response:
            if response.status != 200:
                return None
            load = orjson.loads(await response.read())["loads"][0]
        free_tokens = int(load["max_total_num_tokens"]) - int(load["num_total_tokens"])
        written_at = float(load["timestamp"])
        idle = before is not None and before.written_at == written_at
        running = 0 if idle else int(load["num_running_reqs"])
        return Load(running, free_tokens, written_at)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.info("%s/v1/loads: %s", url, describe(error))  # it may still serve
    except (ValueError, KeyError, IndexError, TypeError) as error:
        logger.warning("%s/v1/loads: unexpected answer (%r)", url, error)
    return None
