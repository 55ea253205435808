"""SGLang's KV events: a conversation that a decode worker has evicted goes remote at once."""

from __future__ import annotations

import aiohttp

from ppd.policies import static_policy

from .conversation import Conversation, user_messages
from .workers import Workers, metric, wait_until


async def test_what_was_dropped_goes_remote_unasked(
    small_pool_workers: Workers, http: aiohttp.ClientSession
) -> None:
    workers = small_pool_workers
    await workers.settle(http)
    first, second, third = user_messages(5, 3)
    prefill, decode = workers.prefill, workers.decode
    roles = ((prefill, "prefill"), (decode, "decode"))
    async with workers.routed(static_policy("full")) as url:

        async def are_connected() -> bool:
            series = [
                f'ppd_kv_events_connected{{role="{role}",worker="{worker.url}"}}'
                for worker, role in roles
            ]
            return all([await metric(http, url, one) == 1 for one in series])

        await wait_until(are_connected)
        conversation = Conversation(http, url)
        await conversation.send(first)
        assert (await conversation.send(second)).route == "local"
        evicted = f'ppd_kv_evicted_tokens_total{{role="decode",worker="{decode.url}"}}'
        held_tokens = conversation.turns[-1].total_tokens
        seed = 100
        while await metric(http, url, evicted) < held_tokens:
            assert seed < 120, "the cache has room for few of them"
            await Conversation(http, url).send(user_messages(seed, 1)[0])
            seed += 1
        turn = await conversation.send(third)
        assert (turn.route, turn.reason) == ("remote", "evicted")
        assert (await conversation.send(second)).route == "local"
        refused = 'ppd_local_refused_total{reason="too_few_cached_tokens"}'
        assert await metric(http, url, refused) == 0
        for worker, role in roles:
            missed = f'ppd_kv_events_missed_total{{role="{role}",worker="{worker.url}"}}'
            assert await metric(http, url, missed) == 0
    assert workers.monolithic is not None
    alone = Conversation(http, workers.monolithic.url)
    expected = await alone.send_all((first, second, third, second))
    assert [t.ids for t in conversation.turns] == [t.ids for t in expected]
    await workers.settle(http)
