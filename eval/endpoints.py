"""Requests to servers before and between runs: vocabulary, context length, caches, health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from ppd.errors import WorkerError

# For servers that report no vocabulary: every tokenizer has these, and few are special.
ANY_VOCABULARY = range(32, 96)


async def vocabulary_of(http: aiohttp.ClientSession, decode_url: str) -> range:
    """Ask a decode worker with the plugin for token ids that prompts may have.

    Special tokens are left out: they stand first, or are few.
    """
    async with http.get(f"{decode_url}/server_info") as answer:
        size: int = (await answer.json())["internal_states"][0]["ppd"]["vocab_size"]
    return range(size // 16, size)


async def find_vocabulary(http: aiohttp.ClientSession, url: str) -> range | None:
    """Ask whatever serves at a URL for token ids that prompts may have.

    Args:
        url: of a worker, or of a router that lists its workers.

    Returns:
        The ids, see :func:`vocabulary_of`; None if no server lists them.
    """
    listed = await _get_json(http, f"{url}/workers")
    workers = (
        [server for server in listed if isinstance(server, dict)]
        if isinstance(listed, list)
        else []
    )
    decode = [
        worker["url"] for worker in workers if worker.get("role") == "decode" and "url" in worker
    ]
    for server in (url, *decode[:1]):
        with suppress(aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError):
            return await vocabulary_of(http, server)
    return None


async def max_context_of(http: aiohttp.ClientSession, url: str, model: str = "") -> int | None:
    """Ask how many tokens the model at ``url`` can hold of one conversation; None: unknown.

    Args:
        model: its name, where there may be several.

    Raises:
        aiohttp.ClientError, TimeoutError: there is no answer.
    """
    async with http.get(f"{url}/v1/models"):
        pass
    with suppress(LookupError, TypeError, ValueError, StopIteration):
        models = await _get_json(http, f"{url}/v1/models")
        found = next(one for one in models["data"] if model in ("", one["id"]))
        return int(found["max_model_len"])
    return None


async def _get_json(http: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with http.get(url) as answer:
            return orjson.loads(await answer.read()) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def empty_caches(
    http: aiohttp.ClientSession, urls: Sequence[str], timeout_s: float = 120.0
) -> None:
    """Empty the workers' radix caches, which a server does only when it is idle: waits for it.

    Raises:
        WorkerError: one is not there, or was not idle in time.
    """
    for url in urls:
        problem = "it does not answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    async with http.post(f"{url}/flush_cache") as answer:
                        if answer.status == 200:
                            break
                        problem = f"/flush_cache answered {answer.status}: it is never idle"
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise WorkerError(f"{url}: {problem}") from error
        except aiohttp.ClientError as error:
            raise WorkerError(f"{url}: {error or type(error).__name__}") from error


async def is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a worker reports that it can serve."""
    try:
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with http.get(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
