"""Replies that something shapes: stop conditions, grammars, penalties. Compared with a monolithic
server's, on the decode worker itself."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from ppd.contract import LocalTerms

from .conftest import Workers

SHAPES: tuple[dict[str, Any], ...] = (
    {"stop": ["e", "a1"]},
    {"regex": "(ab|cd){3,9}!"},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}}'},
    {"min_new_tokens": 5, "stop_token_ids": [40, 41, 42, 43, 44, 45, 46]},
)
# With overlap scheduling upstream counts a token one step later, or two where it skips the overlap
# between two batches: ids of two servers differ, whatever a turn's route.
WITHOUT_OVERLAP: tuple[dict[str, Any], ...] = (*SHAPES, {"frequency_penalty": 1.5})


async def compare_shaped(
    workers: Workers, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    """With others decoding beside it, which it must not touch."""
    await workers.settle(http)
    assert workers.monolithic is not None
    opening = [10 + i % 70 for i in range(300)]
    here, there = workers.decode.url, workers.monolithic.url
    await generate(http, here, opening, {}, LocalTerms(0).to_custom_params())
    found = []
    for server in (here, there):
        local = server == here
        asked = [([*opening, 20, 21, 22], fields, 192)]
        asked += [([30 + i] * 80, {}, 0) for i in range(3)]
        found.append(
            await asyncio.gather(
                *(
                    generate(
                        http,
                        server,
                        ids,
                        sampling,
                        LocalTerms(least).to_custom_params() if local else {},
                    )
                    for ids, sampling, least in asked
                )
            )
        )
    ours, alone = found
    assert ours == alone
    await workers.settle(http)


async def generate(
    http: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    sampling: dict[str, Any],
    custom: dict[str, Any],
    **fields: Any,
) -> tuple[list[int], str]:
    params = {"temperature": 0, "max_new_tokens": 40, **sampling, "custom_params": custom or None}
    body = {"input_ids": ids, "sampling_params": params, **fields}
    async with http.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]
