"""Requests of token ids, without a router: plain ones, and ones with sampling constraints.

Replies of a decode worker to local requests are compared with those of a monolithic server.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from ppd.contract import LocalTerms

from .workers import Workers

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"stop": ["e", "a1"]},
    {"regex": "(ab|cd){3,9}!"},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}}'},
    {"min_new_tokens": 5, "stop_token_ids": [40, 41, 42, 43, 44, 45, 46]},
)
# With overlap scheduling SGLang counts a token one step later, or two steps later where it skips
# the overlap between two batches. Then ids of two servers differ, whatever a turn's route.
CONSTRAINTS_WITHOUT_OVERLAP: tuple[dict[str, Any], ...] = (
    *CONSTRAINTS,
    {"frequency_penalty": 1.5},
)

Generated = tuple[list[int], str]  # token ids and the type of the finish reason


async def compare_constrained(
    workers: Workers, http: aiohttp.ClientSession, sampling: dict[str, Any]
) -> None:
    """Check that a constrained local turn gives the ids of a monolithic server.

    Three unconstrained requests run beside it, whose ids the constraint must not change.

    Args:
        sampling: the constraint, as sampling parameters.
    """
    await workers.settle(http)
    assert workers.monolithic is not None
    opening = [10 + i % 70 for i in range(300)]
    decode, monolithic = workers.decode.url, workers.monolithic.url
    await generate(http, decode, opening, {}, LocalTerms(0).to_custom_params())
    # Prompt, sampling parameters, and the tokens that the decode worker must hold.
    requests = [
        ([*opening, 20, 21, 22], sampling, 192),
        *(([30 + i] * 80, {}, 0) for i in range(3)),
    ]
    local = await asyncio.gather(
        *(
            generate(http, decode, ids, params, LocalTerms(min_cached).to_custom_params())
            for ids, params, min_cached in requests
        )
    )
    expected = await asyncio.gather(
        *(generate(http, monolithic, ids, params, {}) for ids, params, _ in requests)
    )
    assert local == expected
    await workers.settle(http)


async def generate(
    http: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    sampling: dict[str, Any],
    custom_params: dict[str, Any],
    **fields: Any,
) -> Generated:
    """Generate greedily from token ids, at most 40 tokens unless ``sampling`` has its own limit.

    Args:
        sampling: sampling parameters.
        custom_params: terms of a local request; empty for any other.
        fields: further fields of the request.

    Raises:
        AssertionError: the response is an error.
    """
    params = {
        "temperature": 0,
        "max_new_tokens": 40,
        **sampling,
        "custom_params": custom_params or None,
    }
    body = {"input_ids": ids, "sampling_params": params, **fields}
    async with http.post(f"{url}/generate", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    return reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]
