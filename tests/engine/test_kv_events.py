"""SGLang's own KV events: a conversation that a decode worker has dropped goes remote unasked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest

from eval.cluster import Launcher, Process, free_port, wait_all
from ppd.contract import Role
from ppd.policies import static_policy

from .conftest import Workers
from .talk import Talk, script
from .test_trouble import metric

ROOM = 1600


@pytest.fixture
def publishing(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The same monolithic server; prefill and decode publish, and decode has little room."""

    def start(role: Role, *flags: str) -> Process:
        events = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"})
        page = ("--page-size", str(workers.page_size), "--kv-events-config", events)
        return launcher.worker(role, workers.model, *page, *flags, name=f"publishing-{role}")

    backup = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    prefill = start(Role.PREFILL)
    decode = start(Role.DECODE, "--max-total-tokens", str(ROOM), *backup)
    wait_all([prefill, decode])
    yield replace(workers, prefill=prefill, decode=decode)
    prefill.stop()
    decode.stop()


async def test_what_was_dropped_goes_remote_unasked(
    publishing: Workers, http: aiohttp.ClientSession
) -> None:
    first, second, third = script(5, 3)
    prefill, decode = publishing.prefill, publishing.decode
    async with publishing.routed(static_policy("full")) as url:
        for worker, role in ((prefill, "prefill"), (decode, "decode")):
            heard = f'ppd_kv_events_connected{{role="{role}",worker="{worker.url}"}}'
            while await metric(http, url, heard) != 1:
                pass  # each look is a round trip
        talk = Talk(http, url)
        await talk.say(first)
        assert (await talk.say(second)).route == "local"
        dropped = f'ppd_kv_evicted_tokens_total{{role="decode",worker="{decode.url}"}}'
        held = talk.turns[-1].total_tokens
        seed = 100
        while await metric(http, url, dropped) < held:
            assert seed < 120, "the cache has room for few of them"
            await Talk(http, url).say(script(seed, 1)[0])
            seed += 1
        turn = await talk.say(third)
        assert (turn.route, turn.reason) == ("remote", "evicted")
        assert (await talk.say(second)).route == "local"
        refused = 'ppd_local_refused_total{reason="too_few_cached_tokens"}'
        assert await metric(http, url, refused) == 0
        for worker, role in ((prefill, "prefill"), (decode, "decode")):
            missed = f'ppd_kv_events_missed_total{{role="{role}",worker="{worker.url}"}}'
            assert await metric(http, url, missed) == 0
    assert publishing.monolithic is not None
    alone = Talk(http, publishing.monolithic.url)
    for text in (first, second, third, second):
        await alone.say(text)
    assert [t.ids for t in talk.turns] == [t.ids for t in alone.turns]
    await publishing.settle(http)
