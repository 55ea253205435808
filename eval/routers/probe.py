"""Sends requests to one router after the other, and measures what each costs."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from ppd.decision import Route

from ..http_stream import Reply, StreamConnection, Tally, connect_many, http_request
from .candidates import Candidate
from .everything import KEY
from .load import Load, Window, latencies

_CHUNK = b'"content":" token"'
_REPLY = {"role": "assistant", "content": " token"}
_PREAMBLE = "You are a helpful assistant. " * 20
_LONG_BYTES, _MESSAGE_BYTES = 400_000, 4_000
_KEY = f"Authorization: Bearer {KEY}\r\n"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Loop:
    """What a closed loop of requests has cost.

    Attributes:
        cpu_us: the router's CPU time of a request.
        per_s: requests per second.
        took_s: durations of the requests.
    """

    cpu_us: float
    per_s: float
    took_s: Sequence[float]


class Probe:
    """Sends requests to routers, and measures what they cost.

    Args:
        direct: port of the decode worker itself.
    """

    def __init__(self, http: aiohttp.ClientSession, direct: int, model: str) -> None:
        self._http = http
        self._direct = direct
        self._model = model
        self._asked = 0

    # -- requests that do not stream ----------------------------------------------------

    async def first_turns(self, candidate: Candidate, connections: int, requests: int) -> Loop:
        """Measure requests that each open a conversation."""
        each = requests // connections
        turns = [[self._opening() for _ in range(each)] for _ in range(connections)]
        return await self._closed_loop(candidate, turns)

    async def long_turns(self, candidate: Candidate, connections: int, requests: int) -> Loop:
        """Measure first turns whose bodies are 400 kB of earlier messages."""
        each = requests // connections
        turns = [[self._long_opening() for _ in range(each)] for _ in range(connections)]
        return await self._closed_loop(candidate, turns)

    async def later_turns(self, candidate: Candidate, conversations: int, turns: int) -> Loop:
        """Measure the turns after the first of conversations, all of which must be local."""
        histories = [self._opening() for _ in range(conversations)]
        await self._closed_loop(candidate, [[history] for history in histories])
        later = []
        for history in histories:
            grown = [history]
            for _ in range(turns):
                grown.append([*grown[-1], _REPLY, {"role": "user", "content": "Go on, please."}])
            later.append(grown[1:])
        return await self._closed_loop(candidate, later, Route.LOCAL)

    async def _closed_loop(
        self,
        candidate: Candidate,
        turns: Sequence[Sequence[list[Message]]],
        route: Route | None = None,
    ) -> Loop:
        """Send a list of requests on each connection, one after the other.

        Args:
            route: what each response must name, if the router is one of ours.
        """
        requests = [[self._request(messages, 1, False) for messages in of] for of in turns]
        links = await connect_many(candidate.port, len(turns), Tally(), _CHUNK)

        async def ask(link: StreamConnection, own: Iterable[bytes]) -> list[Reply]:
            return [await link.ask(request) for request in own]

        cpu_s, began_s = candidate.cpu_s(), time.monotonic()
        answers = await asyncio.gather(*map(ask, links, requests))
        cpu_s, wall_s = candidate.cpu_s() - cpu_s, time.monotonic() - began_s
        replies = [reply for of in answers for reply in of]
        candidate.note(replies, 1)
        if route is not None:
            candidate.note_routes(replies, route)
        _close(links)
        took_s = [reply.ended_s - reply.sent_s for reply in replies]
        return Loop(1e6 * cpu_s / len(replies), len(replies) / wall_s, took_s)

    # -- streams ------------------------------------------------------------------------

    async def streams(self, candidate: Candidate, load: Load) -> tuple[Window, list[Reply]]:
        """Measure streams that are all open at once.

        Returns:
            What was seen while all were open, and their whole replies.
        """
        chunks = load.chunks // load.slices
        await self._post("/rhythm", {"interval_s": load.interval_s, "burst": load.burst})
        tally = Tally()
        links = await connect_many(candidate.port, load.streams, tally, _CHUNK)
        for link in links:
            link.keeps_stamps = True
        requests = [self._request(self._opening(), chunks, True) for _ in links]
        asked = [
            asyncio.create_task(link.ask(request))
            for link, request in zip(links, requests, strict=True)
        ]
        every = asyncio.gather(*asked)
        await tally.reached(load.streams, 0, every)
        cpu_s, began_s, by_child = candidate.cpu_s(), time.monotonic(), candidate.children_cpu_s()
        first, reads = tally.chunks, tally.reads
        last = first + load.window * (load.streams * chunks - first)
        await tally.reached(0, int(last), every)
        counted, reads = tally.chunks - first, tally.reads - reads
        cpu_s, wall_s = candidate.cpu_s() - cpu_s, time.monotonic() - began_s
        shares = _shares(by_child, candidate.children_cpu_s())
        mb = candidate.mb()
        replies = await every
        candidate.note(replies, chunks)
        _close(links)
        late_s = (await self._post("/slip", {}))["late_s"]
        slip_s = statistics.quantiles(late_s, n=100)[98] if load.interval_s and late_s[1:] else None
        return Window(counted, reads, wall_s, cpu_s, mb, shares, slip_s), replies

    async def first_tokens(self, candidate: Candidate, pairs: int) -> tuple[float, float]:
        """Measure what a router adds to the time to the first token.

        Returns:
            p50 and p99, over the p50 of the worker asked directly, in ms.
        """
        await self._post("/rhythm", {"interval_s": 0.0, "burst": 2})
        took: dict[int, list[float]] = defaultdict(list)
        tally = Tally()
        links = {
            port: (await connect_many(port, 1, tally, _CHUNK))[0]
            for port in (candidate.port, self._direct)
        }
        for link in links.values():
            link.acknowledges_at_once = True  # else Nagle's algorithm costs some of them 40 ms
        for _ in range(pairs):
            for port, link in links.items():
                answer = await link.ask(self._request(self._opening(), 2, True))
                took[port].append(1e3 * answer.ttft_s)
                if port == candidate.port:
                    candidate.note([answer], 2)
        _close(links.values())
        cuts = statistics.quantiles(took[candidate.port], n=100)
        direct = statistics.median(took[self._direct])
        return cuts[49] - direct, cuts[98] - direct

    # -- bodies -------------------------------------------------------------------------

    def _opening(self) -> list[Message]:
        """Return the messages of a first turn: no two are alike."""
        self._asked += 1
        return [
            {"role": "system", "content": _PREAMBLE},
            {"role": "user", "content": f"Question {self._asked}."},
        ]

    def _long_opening(self) -> list[Message]:
        text = "All of this has been discussed before. ".ljust(_MESSAGE_BYTES, "x")
        earlier = [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i in range(_LONG_BYTES // _MESSAGE_BYTES)
        ]
        system, question = self._opening()
        return [system, question, _REPLY, *earlier, question]

    def _request(self, messages: Sequence[Message], chunks: int, stream: bool) -> bytes:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": chunks,
            "temperature": 0,
            "stream": stream,
        }
        return http_request("/v1/chat/completions", json.dumps(body).encode(), headers=_KEY)

    async def _post(self, path: str, body: object) -> dict[str, list[float]]:
        """Send the workers a request of the bench itself."""
        async with self._http.post(f"http://127.0.0.1:{self._direct}{path}", json=body) as answer:
            answer.raise_for_status()
            found: dict[str, list[float]] = await answer.json()
            return found


def stream_costs(load: Load, window: Window, replies: Sequence[Reply]) -> dict[str, float]:
    """Return the figures of one slice of a load, each with the load's name at its end."""
    found = {**window.costs(load), **latencies(replies)}
    return {f"{name}_{load.name}": value for name, value in found.items()}


def _close(links: Iterable[StreamConnection]) -> None:
    for link in links:
        link.close()


def _shares(before_s: dict[int, float], after_s: dict[int, float]) -> list[float]:
    """Return each child's share of the CPU time that all of them have used."""
    spent = [after_s[pid] - before_s.get(pid, 0.0) for pid in after_s]
    return [s / sum(spent) for s in spent] if sum(spent) > 0 else []
