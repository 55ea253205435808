"""Requests that others route: without a bootstrap room, and with the draft's field and flag.

No router is between these clients and the decode servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest

from eval.cluster import Launcher, Process
from eval.dialects import split_events, text_in
from ppd.contract import RefusalReason, parse_refusal
from sglang_patches.request_field import FLAG

from .routes import RouteClient, random_ids
from .workers import Workers, begin_stop, plugin_state, start_decode

_BOUND = 1500  # uncached tokens
_PROMPT = "A heron stands in the shallow water and waits. " * 8
_SAMPLING = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": _PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
    },
    "/v1/completions": {"model": "default", "prompt": _PROMPT, **_SAMPLING},
    "/v1/chat/completions": {
        "model": "default",
        "messages": [{"role": "user", "content": _PROMPT}],
        **_SAMPLING,
    },
}
_MARK = {"do_local_prefill": True}
endpoints = pytest.mark.parametrize("path", list(_BODIES))
ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def unroomed(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The shared workers, but a decode server that serves requests without a bootstrap room."""
    bound = ("--ppd-unroomed", "--ppd-max-append-tokens", str(_BOUND))
    decode = start_decode(workers, launcher, "unroomed", FLAG, *bound)
    yield replace(workers, decode=decode)
    begin_stop([decode])


async def post(
    http: aiohttp.ClientSession, worker: Process | None, path: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    """Post a request to a server itself; return the status and the body."""
    assert worker is not None
    async with http.post(f"{worker.url}{path}", json=body) as response:
        return response.status, await response.read()


async def text(
    http: aiohttp.ClientSession, worker: Process | None, path: str, body: dict[str, Any]
) -> str:
    """Return the text of a successful reply, streamed or whole."""
    status, reply = await post(http, worker, path, body)
    assert status == 200, reply
    events = split_events(reply) if body.get("stream") else [reply]
    return text_in(path, [orjson.loads(event) for event in events if event != b"[DONE]"])


async def refusal(
    http: aiohttp.ClientSession, worker: Process, path: str, body: dict[str, Any]
) -> tuple[int, RefusalReason | None]:
    """Return the status of a refused request, and the plugin's reason if there is one."""
    status, reply = await post(http, worker, path, body)
    error = orjson.loads(reply)
    found = parse_refusal(error.get("message") or error["error"]["message"])
    return status, None if found is None else found.reason


@endpoints
@ways
async def test_a_request_without_a_room_is_prefilled_here(
    unroomed: Workers, http: aiohttp.ClientSession, path: str, stream: bool
) -> None:
    await unroomed.settle(http)
    before = (await plugin_state(http, unroomed.decode))["unroomed"]
    body = {**_BODIES[path], "stream": stream}
    expected = await text(http, unroomed.monolithic, path, body)
    assert len(expected) > 10
    assert await text(http, unroomed.decode, path, body) == expected
    assert (await plugin_state(http, unroomed.decode))["unroomed"] == before + 1
    await unroomed.settle(http)


async def test_the_log_names_the_option_once(
    unroomed: Workers, http: aiohttp.ClientSession
) -> None:
    for path, body in _BODIES.items():
        await text(http, unroomed.decode, path, body)
    assert unroomed.decode.log.read_text().count("PPD_UNROOMED=1).") == 1
    await unroomed.settle(http)


async def test_a_batch_without_rooms_beside_transferred_requests(
    unroomed: Workers, http: aiohttp.ClientSession
) -> None:
    await unroomed.settle(http)
    client = RouteClient(http, unroomed)
    prompts = [random_ids(seed, 200 + 40 * seed) for seed in range(3)]
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    batch = {"input_ids": prompts, "sampling_params": sampling}
    transferred = [asyncio.create_task(client.remote(random_ids(9 + i, 300), 30)) for i in range(2)]
    status, reply = await post(http, unroomed.decode, "/generate", batch)
    assert status == 200, reply
    got = [one["output_ids"] for one in orjson.loads(reply)]
    assert got == [(await client.alone(prompt, 30)).ids for prompt in prompts]
    for i, task in enumerate(transferred):
        assert (await task).ids == (await client.alone(random_ids(9 + i, 300), 30)).ids
    await unroomed.settle(http)


async def test_a_later_turn_finds_the_earlier_one_in_the_cache(
    unroomed: Workers, http: aiohttp.ClientSession
) -> None:
    await unroomed.settle(http)
    sampling = {"temperature": 0, "max_new_tokens": 8}
    first = random_ids(5, 400)
    for ids, cached in ((first, 0), ([*first, 20, 21, 22], 384)):
        body = {"input_ids": ids, "sampling_params": sampling}
        status, reply = await post(http, unroomed.decode, "/generate", body)
        assert status == 200, reply
        assert orjson.loads(reply)["meta_info"]["cached_tokens"] >= cached
    await unroomed.settle(http)


async def test_a_request_beyond_the_bound_is_refused(
    unroomed: Workers, http: aiohttp.ClientSession
) -> None:
    await unroomed.settle(http)
    body = {"input_ids": random_ids(6, _BOUND + 100), "sampling_params": {"max_new_tokens": 4}}
    found = await refusal(http, unroomed.decode, "/generate", body)
    assert found == (503, RefusalReason.TOO_MANY_TOKENS)
    await unroomed.settle(http)


@endpoints
@ways
async def test_the_field_at_the_top_level_asks_for_a_local_prefill(
    workers: Workers, http: aiohttp.ClientSession, path: str, stream: bool
) -> None:
    await workers.settle(http)
    body = {**_BODIES[path], "stream": stream}
    expected = await text(http, workers.monolithic, path, body)
    assert await text(http, workers.decode, path, {**body, **_MARK}) == expected
    await workers.settle(http)


@endpoints
async def test_the_precondition_at_the_top_level_is_checked(
    workers: Workers, http: aiohttp.ClientSession, path: str
) -> None:
    await workers.settle(http)
    body = {**_BODIES[path], **_MARK, "min_cached_tokens": 300}
    found = await refusal(http, workers.decode, path, body)
    assert found == (503, RefusalReason.TOO_FEW_CACHED_TOKENS)
    malformed = {**body, "min_cached_tokens": "many"}
    found = await refusal(http, workers.decode, path, malformed)
    assert found == (400, RefusalReason.MALFORMED_TERMS)
    await workers.settle(http)


@endpoints
async def test_without_option_or_field_a_room_is_required(
    workers: Workers, http: aiohttp.ClientSession, path: str
) -> None:
    for fields in ({}, {"do_local_prefill": False}):
        body = {**_BODIES[path], **fields}
        assert await refusal(http, workers.decode, path, body) == (400, None)
    assert (await plugin_state(http, workers.decode))["unroomed"] == 0


@endpoints
async def test_the_field_needs_the_plugin(
    workers: Workers, http: aiohttp.ClientSession, plain: Process, path: str
) -> None:
    assert await refusal(http, plain, path, {**_BODIES[path], **_MARK}) == (400, None)


@pytest.fixture(scope="module")
def plain(workers: Workers, launcher: Launcher) -> Iterator[Process]:
    """A decode server without the plugin."""
    decode = start_decode(workers, launcher, "plain", "--ppd-plain")
    yield decode
    begin_stop([decode])
