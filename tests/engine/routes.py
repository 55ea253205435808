"""A client of token ids that takes each turn's route itself, without a router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from eval.engine.client import bootstrap_port_of
from ppd.contract import LocalTerms

from .workers import Workers

# Tokens at the end of a conversation that its next turn need not find cached: a page, the last
# token, and what the bigram keys of EAGLE leave out.
_MAX_UNCACHED = 32

_rooms = count(1000)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to one turn.

    Attributes:
        histogram: how many verify steps accepted 0, 1, 2, ... draft tokens; empty without
            speculation.
    """

    ids: list[int]
    cached_tokens: int
    histogram: list[int]

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a verify step, with the bonus token."""
        accepted = sum(i * count for i, count in enumerate(self.histogram))
        return 1 + accepted / sum(self.histogram)


class RouteClient:
    """Sends turns of token ids to the workers directly, greedily.

    Args:
        fields: added to the body of each request.
        rank: of the decode worker, for all turns.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        workers: Workers,
        fields: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> None:
        self._http = http
        self._workers = workers
        self._fields = fields or {}
        self._rank = {} if rank is None else {"routed_dp_rank": rank}

    async def alone(self, ids: list[int], tokens: int) -> Reply:
        """Send a turn to the monolithic server."""
        assert self._workers.monolithic is not None
        return await self._send(self._workers.monolithic.url, ids, tokens, {})

    async def local(self, ids: list[int], tokens: int, min_cached: int = 0) -> Reply:
        """Send a local turn to the decode worker."""
        terms = {"custom_params": LocalTerms(min_cached).to_custom_params()}
        return await self._send(self._workers.decode.url, ids, tokens, terms)

    async def remote(self, ids: list[int], tokens: int) -> Reply:
        """Send a turn through the prefill worker."""
        prefill, decode = self._workers.prefill, self._workers.decode
        bootstrap = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": await bootstrap_port_of(self._http, prefill.url),
            "bootstrap_room": next(_rooms),
        }
        _, reply = await asyncio.gather(
            *(self._send(w.url, ids, tokens, {}, **bootstrap) for w in (prefill, decode))
        )
        return reply

    async def converse(
        self,
        seed: int,
        routes: Sequence[str],
        *,
        first_tokens: int = 300,
        new_tokens: int = 25,
        reply_tokens: int = 40,
    ) -> list[Reply]:
        """Hold a conversation whose turns take the given routes.

        Args:
            routes: ``alone``, ``local`` or ``remote`` for each turn. A local turn requires the KV
                of the turns before.
        """
        history, replies, held = random_ids(seed, first_tokens), list[Reply](), 0
        for number, route in enumerate(routes):
            match route:
                case "local":
                    reply = await self.local(history, reply_tokens, held)
                case "remote":
                    reply = await self.remote(history, reply_tokens)
                case _:
                    reply = await self.alone(history, reply_tokens)
            replies.append(reply)
            held = max(0, len(history) - _MAX_UNCACHED)
            new = random_ids(seed + 100 * (number + 1), new_tokens)
            history = [*history, *reply.ids, *new]
        return replies

    async def _send(
        self, url: str, ids: list[int], tokens: int, params: dict[str, Any], **fields: Any
    ) -> Reply:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        body = {"input_ids": ids, "sampling_params": sampling, **self._fields, **fields}
        if url == self._workers.decode.url:
            body |= self._rank
        async with self._http.post(f"{url}/generate", json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
        meta = reply["meta_info"]
        return Reply(
            reply["output_ids"],
            meta["cached_tokens"],
            meta.get("spec_correct_drafts_histogram") or [],
        )


def random_ids(seed: int, tokens: int) -> list[int]:
    """Token ids of printable characters."""
    source = random.Random(seed)
    return [source.randint(10, 90) for _ in range(tokens)]
