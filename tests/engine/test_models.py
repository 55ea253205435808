"""Two models on real workers behind one router: each conversation has the ids of its own model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eval.tiny_model import ModelSpec
from ppd.policies import static_policy
from router.config.models import ModelOptions
from router.config.options import RouterConfig
from router.server.run import running

from .conversation import Conversation, user_messages
from .reference import greedy_ids, reference_model
from .test_table import cheap_local, cheap_remote, write_table
from .workers import Workers, plugin_state, start_cluster

_TURNS, _TOKENS = 4, 16
_PROMPT = list(range(10, 40))


@pytest.fixture(scope="session")
def blue_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Prefill and decode of another model, which has a short name of its own."""
    name = ("--served-model-name", "blue")
    logs = tmp_path_factory.mktemp("blue")
    yield from start_cluster(
        ModelSpec(seed=1), logs, 1, monolithic=False, prefill_flags=name, decode_flags=name
    )


async def test_two_models_behind_one_router(
    workers: Workers, blue_workers: Workers, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    red = str(workers.model)
    tables = {
        red: write_table(tmp_path / "red.json", cheap_local, red),
        "blue": write_table(tmp_path / "blue.json", cheap_remote, "blue"),
    }
    both = (workers, blue_workers)
    for one in both:
        await one.settle(http)
    before = [(await plugin_state(http, one.decode))["accepted"] for one in both]
    config = RouterConfig(
        prefill=tuple(one.prefill.url for one in both),
        decode=tuple(one.decode.url for one in both),
        port=0,
        models={name: ModelOptions(table=str(path)) for name, path in tables.items()},
    )
    async with running(config) as url:
        chats = [
            Conversation(http, url, _TOKENS, {"model": name}) for _ in range(2) for name in tables
        ]
        # The same messages go to both models, at the same time.
        texts = [user_messages(i // 2, _TURNS) for i in range(len(chats))]
        turns = await asyncio.gather(
            *(chat.send_all(own) for chat, own in zip(chats, texts, strict=True))
        )
        generated = await _generate(http, url, "blue")
        async with http.get(f"{url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == [red, "blue"]
        async with http.post(f"{url}/generate", json={"text": "a"}) as response:
            assert (response.status, red in await response.text()) == (400, True)

    # As each model answers without the other one, and its weights are those of its name.
    assert workers.monolithic is not None
    async with blue_workers.routed(static_policy("pd")) as alone:
        for i, own in enumerate(turns):
            at = workers.monolithic.url if i % 2 == 0 else alone
            expected = await Conversation(http, at, _TOKENS).send_all(texts[i])
            assert [turn.ids for turn in own] == [turn.ids for turn in expected]
    assert turns[0][0].ids != turns[1][0].ids
    assert generated == greedy_ids(reference_model(blue_workers.model), _PROMPT, _TOKENS)

    assert {turn.route for own in turns[1::2] for turn in own[1:]} == {"remote"}
    local = sum(turn.route == "local" for own in turns[::2] for turn in own)
    assert local, "the table of the first model prefers local turns"
    accepted = [(await plugin_state(http, one.decode))["accepted"] for one in both]
    assert accepted == [before[0] + local, before[1]]
    for one in both:
        await one.settle(http)


async def _generate(http: aiohttp.ClientSession, url: str, model: str) -> list[int]:
    """The ids that SGLang's native API generates; its requests name their model, too."""
    sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    body = {"model": model, "input_ids": _PROMPT, "sampling_params": sampling}
    async with http.post(f"{url}/generate", json=body) as response:
        reply: dict[str, Any] = await response.json()
    ids: list[int] = reply["output_ids"]
    return ids
