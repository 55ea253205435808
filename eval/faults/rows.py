"""The faults of ``bench fault-table``, and what a client should receive of each.

A cell is right if the client receives at once exactly one error, or all that could be had, and
nothing is left behind. An error is a status of 500 or more, or an error event in a stream. The
table makes no difference between these.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..fake_worker.fault import Fault
from ..fake_worker.ranks import Ranks
from ..http_stream import HangUp, Patience, Reply
from .fixture import (
    SOON_S,
    WAIT_S,
    FaultFixture,
    closed_within_s,
    describe,
    ends_once,
    is_whole,
    reports_error,
)

_FAILURES = 20
_RECOVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one row for one router."""

    right: bool
    words: str


def truncated(fault: Fault) -> Callable[[FaultFixture], Awaitable[Cell]]:
    """Return the play of a stream that breaks off in one way."""

    async def play(fixture: FaultFixture) -> Cell:
        fixture.faults["decode"].pace_s = 0.02
        reply = await fixture.ask({"decode": fault})
        cut = not reply.whole and reply.broken not in ("", "no end in time")
        return Cell(reports_error(reply) or cut, describe(reply))

    return play


async def terminal_events(fixture: FaultFixture) -> Cell:
    """Break streams off in four ways: each must end with one error."""
    seen: list[str] = []
    right = True
    fixture.faults["decode"].pace_s = 0.02
    for fault in (Fault.RESETS, Fault.ENDS_EARLY, Fault.ERROR_LATER, Fault.ERROR_ENDS):
        reply = await fixture.ask({"decode": fault})
        fixture.heal()
        right = right and ends_once(reply)
        seen.append(str(len(reply.errors)))
    return Cell(right, f"{', '.join(seen)} error events")


async def late_headers(fixture: FaultFixture) -> Cell:
    """Let the prefill worker answer late: the first token must not wait for it."""
    reply = await fixture.ask({"prefill": Fault.LATE})
    late_s = fixture.faults["prefill"].late_s
    right = is_whole(reply) and reply.ttft_s < late_s / 2
    return Cell(right, f"first token after {reply.ttft_s:.2f} s")


async def hanging_prefill(fixture: FaultFixture) -> Cell:
    """Let the prefill worker never answer: its leg must be closed with the stream."""
    reply = await fixture.ask({"prefill": Fault.HANGS})
    closed_s = await closed_within_s(fixture, "prefill", reply.ended_s)
    left = "" if closed_s is not None else ", prefill leg left open"
    return Cell(is_whole(reply) and closed_s is not None, describe(reply) + left)


def failing(fails: str, waits: str) -> Callable[[FaultFixture], Awaitable[Cell]]:
    """Return the play of one worker that answers 500 while the other waits for it."""

    async def play(fixture: FaultFixture) -> Cell:
        reply = await fixture.ask({fails: Fault.FAILS, waits: Fault.HANGS})
        reported = reports_error(reply)
        seen = describe(reply) + (
            f" after {reply.ended_s - reply.sent_s:.2f} s" if reported else ""
        )
        closed_s: float | None = 0.0
        if not (fixture.local and waits == "prefill"):
            closed_s = await closed_within_s(fixture, waits, reply.ended_s)
        left = "" if closed_s is not None else f", {waits} leg left open"
        return Cell(reported and closed_s is not None and closed_s < SOON_S, seen + left)

    return play


async def failing_both(fixture: FaultFixture) -> Cell:
    """Let the prefill worker answer 500, and the decode worker answer well, but later."""
    fixture.faults["decode"].late_s = 0.5
    reply = await fixture.ask({"prefill": Fault.FAILS, "decode": Fault.LATE})
    return Cell(reports_error(reply), describe(reply))


async def refusing(fixture: FaultFixture) -> Cell:
    """Take one of two decode workers away, for local turns the home."""
    messages = None
    if fixture.local:
        messages = await fixture.second_turn()
    next(d for d in fixture.decode if d.legs or not fixture.local).vanish()
    replies = [await fixture.ask_once(messages) for _ in range(6)]
    served = sum(is_whole(reply) for reply in replies)
    failed = f" ({describe(replies[-1])})" if served < len(replies) else ""
    return Cell(served == len(replies), f"{served} of {len(replies)} served{failed}")


async def breaker(fixture: FaultFixture) -> Cell:
    """Let the decode worker fail many times: afterwards it must be used again."""
    for _ in range(_FAILURES):
        await fixture.ask({"decode": Fault.FAILS})
        fixture.heal()
    reply = await fixture.ask()
    return Cell(is_whole(reply) and reply.ttft_s < SOON_S, describe(reply))


async def own_bootstrap(fixture: FaultFixture) -> Cell:
    """Send bootstrap fields of the client's own: they must not reach a worker."""
    theirs = {"bootstrap_host": "10.6.6.6", "bootstrap_port": 666, "bootstrap_room": 6666666}
    reply = await fixture.ask(fields=theirs)
    bodies = [leg.body for role in ("prefill", "decode") for leg in fixture.legs(role)]
    kept = [
        name
        for name, value in theirs.items()
        if any(_value(body, name) in (value, str(value)) for body in bodies)
    ]
    seen = (
        f"kept: {', '.join(kept)}" if kept else "replaced" if is_whole(reply) else describe(reply)
    )
    if fixture.local and not kept and is_whole(reply):
        seen = "dropped"
    return Cell(is_whole(reply) and bool(bodies) and not kept, seen)


def _value(body: bytes, name: str) -> object:
    value: object = json.loads(body).get(name)
    return value


async def leaves_early(fixture: FaultFixture) -> Cell:
    """Let a client hang up before either leg has answered."""
    patience = Patience(HangUp.AT_ONCE, after_s=0.5)
    reply = await fixture.ask({"prefill": Fault.HANGS, "decode": Fault.HANGS}, patience)
    return await _left_behind(fixture, reply, ("prefill", "decode"))


async def leaves_in_mid_stream(fixture: FaultFixture) -> Cell:
    """Let a client hang up while the decode worker streams."""
    fixture.faults["decode"].pace_s = 0.05
    patience = Patience(HangUp.AT_ONCE, events=2)
    reply = await fixture.ask(patience=patience, fields={"max_tokens": 1000})
    return await _left_behind(fixture, reply, ("decode",))


async def leaves_a_silent_stream(fixture: FaultFixture) -> Cell:
    """Let a client hang up while the decode worker pauses."""
    patience = Patience(HangUp.AT_ONCE, events=1)
    reply = await fixture.ask({"decode": Fault.HOLDS}, patience)
    return await _left_behind(fixture, reply, ("decode",))


async def _left_behind(fixture: FaultFixture, reply: Reply, roles: Sequence[str]) -> Cell:
    seen: list[str] = []
    right = True
    for role in roles:
        if fixture.local and role == "prefill":
            continue
        closed_s = await closed_within_s(fixture, role, reply.ended_s)
        right = right and closed_s is not None and closed_s < SOON_S
        seen.append(f"{role} leg {'left open' if closed_s is None else f'{closed_s:.2f} s'}")
    return Cell(right, ", ".join(seen))


def restarting(role: str) -> Callable[[FaultFixture], Awaitable[Cell]]:
    """Return the play of a worker that is gone for some requests, then back as another process."""

    async def play(fixture: FaultFixture) -> Cell:
        worker = fixture.prefill if role == "prefill" else fixture.decode[0]
        worker.vanish()
        for _ in range(3):
            await fixture.ask_once()
        await worker.restart()
        back_s = time.monotonic()
        while not is_whole(await fixture.ask_once()):
            if time.monotonic() - back_s > _RECOVERY_S:
                return Cell(False, f"no answer for {_RECOVERY_S:.0f} s")
            await asyncio.sleep(0.05)
        first_s = time.monotonic() - back_s
        failed = sum([not is_whole(await fixture.ask()) for _ in range(10)])
        return Cell(not failed and first_s < WAIT_S, f"back after {first_s:.1f} s, {failed} failed")

    return play


def _flush(ranks: Ranks, _: int) -> None:
    ranks.flush()


def _swap(ranks: Ranks, home: int) -> None:
    ranks.swap(home, 1 - home)


def losing_rank(lose: Callable[[Ranks, int], None]) -> Callable[[FaultFixture], Awaitable[Cell]]:
    """Return the play of a home rank that loses the KV of a conversation.

    Args:
        lose: has the rank of this number lose it.
    """

    async def play(fixture: FaultFixture) -> Cell:
        messages = await fixture.second_turn()
        home = fixture.ranks.served[-1]
        lose(fixture.ranks, home)
        fixture.ranks.served.clear()
        fixture.prefill.legs.clear()
        reply = await fixture.ask_once(messages)
        legs = len(fixture.prefill.legs)
        right = is_whole(reply) and legs == 1 and set(fixture.ranks.served) == {home}
        return Cell(right, f"{describe(reply)}, {legs} remote turn")

    return play


async def silent_rank(fixture: FaultFixture) -> Cell:
    """Have the first rank that is used never answer: the other must serve all requests."""
    await fixture.ask_once()
    home = fixture.ranks.served[-1]
    fixture.ranks.silent.add(home)
    served = sum([is_whole(await fixture.ask_once()) for _ in range(_FAILURES)])
    waited = fixture.ranks.served[1:].count(home)
    right = served == _FAILURES and 0 < waited < _FAILURES / 2
    return Cell(right, f"{served} of {_FAILURES} served, {waited} of them late")


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, and how it is played.

    Attributes:
        remote: it can happen to a first turn.
        local: it can also happen to a local turn.
        decodes: decode workers.
        ranks: of each decode worker; with several, our router is alone in its row.
        answer_timeout_s: our router's limit on the first byte of a response.
    """

    name: str
    play: Callable[[FaultFixture], Awaitable[Cell]]
    remote: bool = True
    local: bool = True
    decodes: int = 1
    ranks: int = 1
    answer_timeout_s: float = 300.0

    @property
    def routes(self) -> Sequence[str]:
        """The routes of the turns to which it can happen."""
        given = (("remote", self.remote), ("local", self.local))
        return [route for route, happens in given if happens]


ROWS = (
    Row("decode resets in mid-stream", truncated(Fault.RESETS)),
    Row("decode ends without [DONE]", truncated(Fault.ENDS_EARLY)),
    Row("error event in mid-stream", truncated(Fault.ERROR_LATER)),
    Row("error as the first event", truncated(Fault.ERROR_FIRST)),
    Row("one terminal event each", terminal_events),
    Row("prefill's head 2 s late", late_headers, local=False),
    Row("prefill hangs, decode streams", hanging_prefill, local=False),
    Row("prefill 500, decode waits", failing("prefill", "decode"), local=False),
    Row("prefill 500, decode answers", failing_both, local=False),
    Row("decode 500, prefill waits", failing("decode", "prefill")),
    Row("one of 2 decodes is gone", refusing, decodes=2),
    Row("20 times decode 500, then well", breaker),
    Row("client's own bootstrap_host", own_bootstrap),
    Row("hang-up before the first event", leaves_early),
    Row("hang-up in mid-stream", leaves_in_mid_stream),
    Row("hang-up while decode pauses", leaves_a_silent_stream),
    Row("decode restarts", restarting("decode")),
    Row("prefill restarts", restarting("prefill")),
    Row("decode rank flushed", losing_rank(_flush), remote=False, ranks=2),
    Row("KV on another decode rank", losing_rank(_swap), remote=False, ranks=2),
    Row("a silent decode rank", silent_rank, local=False, ranks=2, answer_timeout_s=0.5),
)
