"""The clients of a chaos run: conversations, turn after turn, well and badly behaved."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ppd.outcome import Outcome

from ..cluster import ClusterError
from ..dialects import WORKER
from ..fake_worker.fault import Fault
from ..http_stream import HangUp, Patience, Reply, StreamConnection, connect
from .accounting import ClientCounts, outcome_of, problem_of
from .requests import ClientConversation, bad_request, new_conversation, requested_fault

_DEADLINE_S = 60.0
_BACK_OFF_S = 0.2  # where no worker is left
_SHARES = {
    "well": 0.86,
    "hangs up": 0.04,
    "hangs up on silence": 0.02,
    "asks for a fault": 0.04,
    "bad": 0.03,
    "half a request": 0.01,
}


@dataclass(slots=True)
class SentTurn:
    """One request and its outcome.

    Attributes:
        allowed: outcomes that need no explanation.
    """

    path: str
    kind: str
    allowed: tuple[str, ...]
    reply: Reply
    outcome: str


@dataclass(slots=True)
class RunState:
    """What all clients of a run share.

    Attributes:
        left: requests that are still to be sent.
        calm_for: whether no worker will be disrupted for so many seconds.
        drained_since: since when the worker on a port gets no new work; None: it does.
        kinds: requests sent, by kind.
        unexpected: turns whose outcome has to be explained.
        hung_up: turns that their client gave up.
        marks: functions to call when so many requests are left.
        numbers: of requests and conversations.
    """

    port: int
    left: int
    calm_for: Callable[[float], bool]
    drained_since: Callable[[int], float | None]
    counts: ClientCounts = field(default_factory=ClientCounts)
    kinds: Counter[str] = field(default_factory=Counter)
    unexpected: list[SentTurn] = field(default_factory=list)
    hung_up: list[SentTurn] = field(default_factory=list)
    marks: dict[int, Callable[[], None]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def spend(self) -> None:
        """Count one request as sent."""
        self.left -= 1
        if mark := self.marks.pop(self.left, None):
            mark()


class ConversationClient:
    """One client, with one connection at a time."""

    def __init__(self, shared: RunState, source: random.Random) -> None:
        self._shared = shared
        self._source = source
        self._link: StreamConnection | None = None

    async def run(self) -> None:
        """Hold conversations until all requests have been sent."""
        try:
            while self._shared.left > 0:
                await self._converse()
        finally:
            self._hang_up()

    async def _converse(self) -> None:
        source, shared = self._source, self._shared
        conversation = new_conversation(f"c{next(shared.numbers)}", source)
        for _ in range(source.randint(1, 7)):
            if shared.left <= 0:
                return
            shared.spend()
            kind = source.choices([*_SHARES], weights=[*_SHARES.values()])[0]
            shared.kinds[kind] += 1
            if kind == "bad":
                await self._bad()
            elif kind == "half a request":
                await self._half(conversation)
            elif turn := await self._turn(conversation, kind):
                conversation.add_reply(turn.reply)
                conversation.add_prompt(f" And {source.random()}? ")

    async def _turn(self, conversation: ClientConversation, kind: str) -> SentTurn | None:
        """Send a turn; return it if the conversation goes on from it."""
        source = self._source
        number, words, stream = next(self._shared.numbers), source.randint(3, 24), True
        asks, patience = "", None
        allowed: Sequence[str] = (Outcome.OK,)
        match kind:
            case "well":
                stream = source.random() < 0.7
            case "hangs up":
                max_events = source.choice((words, words // 2, words // 2))
                patience = Patience(HangUp.HALF, events=source.randint(1, max_events))
                allowed = (Outcome.OK, Outcome.DISCONNECTED)
            case "hangs up on silence":
                stream, asks, patience = self._silence()
                allowed = (Outcome.DISCONNECTED,)
            case _:
                stream = source.random() < 0.7
                asks, allowed = requested_fault(source, stream)
        request = conversation.request(
            f"{number} {conversation.name} {asks}".strip(), words, stream
        )
        reply = await self._ask(request, patience)
        outcome = outcome_of(reply)
        turn = SentTurn(conversation.path, f"{kind} {asks}".strip(), tuple(allowed), reply, outcome)
        problem = problem_of(conversation.path, number, words, outcome, reply)
        self._note(turn, problem)
        return turn if outcome == Outcome.OK else None

    def _silence(self) -> tuple[bool, str, Patience]:
        """Choose a request whose answer does not end by itself.

        A client that leaves at once does not receive what was under way. So it does that only
        while no worker is about to be disrupted: else the request's outcome would be unknown.
        """
        source = self._source
        how = source.choice((HangUp.HALF, HangUp.AT_ONCE))
        if how is HangUp.AT_ONCE and not self._shared.calm_for(1.0):
            how = HangUp.HALF
        if source.random() < 0.5:
            return True, f"decode={Fault.HOLDS}", Patience(how, events=1)
        # Not sooner: what has not been sent when a client leaves is not sent any more.
        patience = Patience(how, after_s=source.uniform(0.05, 0.3))
        return source.random() < 0.5, f"decode={Fault.HANGS}", patience

    def _note(self, turn: SentTurn, problem: str | None) -> None:
        counts, reply = self._shared.counts, turn.reply
        counts.finished[turn.path, turn.outcome] += 1
        if reply.left and not reply.whole:
            self._shared.hung_up.append(turn)
        if (route := reply.headers.get("x-ppd-route")) is not None:
            counts.turns[turn.path, route, reply.headers["x-ppd-reason"]] += 1
            counts.streams[route] += reply.streams
        if problem is not None:
            counts.unexplained.append(f"{turn.kind}: {problem}")
        if turn.outcome not in turn.allowed:
            self._shared.unexpected.append(turn)
        if turn.outcome == Outcome.OK:
            self._check_worker(reply)

    def _check_worker(self, reply: Reply) -> None:
        port = next((value[WORKER] for value in reply.values if WORKER in value), None)
        since_s = None if port is None else self._shared.drained_since(port)
        if port is None:
            self._shared.counts.unexplained.append("an answer that names no worker")
        elif since_s is not None and since_s < reply.sent_s:
            self._shared.counts.unexplained.append("answered by a worker that was drained")

    async def _bad(self) -> None:
        bad = bad_request(self._source)
        reply = await self._ask(bad.request, None)
        if bad.counted is not None:
            self._shared.counts.finished[bad.counted, Outcome.REJECTED] += 1
        if reply.status != bad.status or not reply.errors:
            received = f"{reply.status} {bytes(reply.body[:200])!r} {reply.broken}"
            self._shared.counts.unexplained.append(f"{bad.name}: {received}")
        if bad.closes:
            self._hang_up()

    async def _half(self, conversation: ClientConversation) -> None:
        """Send a part of a request, which must leave no trace."""
        link = await self._connected()
        link.send(conversation.request("0 half", 3, True)[: self._source.randint(10, 400)])
        link.finish()
        self._link = None

    async def _ask(self, request: bytes, patience: Patience | None) -> Reply:
        link = await self._connected()
        reply = await link.ask(request, deadline_s=_DEADLINE_S, patience=patience)
        if reply.left or not reply.whole:
            self._hang_up()
        elif reply.status == 503:
            await asyncio.sleep(_BACK_OFF_S)
        return reply

    async def _connected(self) -> StreamConnection:
        until_s = time.monotonic() + _DEADLINE_S
        while self._link is None or not self._link.usable:
            with suppress(OSError):
                self._link = await connect(self._shared.port)
            if time.monotonic() > until_s:
                raise ClusterError("the router takes no connections")
        return self._link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


async def run_clients(shared: RunState, clients: int, source: random.Random) -> None:
    """Run so many clients until all requests have been sent."""
    each = [ConversationClient(shared, random.Random(source.random())) for _ in range(clients)]
    await asyncio.gather(*(client.run() for client in each))
