"""What a client saw of its requests, and whether the router's own counts say the same.

Pure: replies in, outcomes and differences out. The words are those of ``ppd_finished``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..dialects import text_in, text_of
from ..http_stream import Reply
from ..prometheus import parse_metrics

OK, REJECTED, OVERLOADED, WORKER_ERROR = "ok", "rejected", "overloaded", "worker_error"
TRUNCATED, DISCONNECTED, INTERNAL = "truncated", "disconnected", "internal_error"
NO_END = "no_end"  # no word of the router's: an answer that just stops, which must not be

Counts = Counter[tuple[str, ...]]


def outcome_of(reply: Reply) -> str:
    """Of a request, from all that its client got.

    A client that has hung up by ``HangUp.HALF`` still sees what was under way to it: if that is
    the end of the answer, the answer had ended before. See ``also``, too.
    """
    if not reply.whole and not (reply.left and reply.dones):
        return DISCONNECTED if reply.left else NO_END
    if reply.status != 200:
        kind = reply.errors[0].get("type") if reply.errors else None
        if kind == "router_error":
            return INTERNAL
        if reply.status == 429:
            return OVERLOADED
        return REJECTED if reply.status < 500 else WORKER_ERROR
    if not reply.streams:
        return OK
    if errors := reply.errors:
        ours = errors[-1].get("type") == "worker_error" and errors[-1].get("code") == 502
        return TRUNCATED if ours else WORKER_ERROR
    return OK if reply.dones == 1 and reply.body.endswith(b"data: [DONE]\n\n") else NO_END


def problem_of(path: str, number: int, words: int, outcome: str, reply: Reply) -> str | None:
    """What is wrong with an answer, whatever came of it."""
    if reply.status != 200:
        return None if outcome == DISCONNECTED or reply.errors else "an error without words"
    if len(reply.errors) > 1:
        return "two errors in one stream"
    values = [value for value in reply.values if "error" not in value]
    received, expected = text_in(path, values), text_of(number, words)
    if outcome == OK and received != expected:
        return f"not its own words: {received!r}"
    if not expected.startswith(received):
        return f"not the beginning of its own words: {received!r}"
    return None


class Trouble(StrEnum):
    KILL = "kill"
    STOP = "stop"
    FLAP = "flap"
    DRAIN = "drain"


@dataclass(slots=True)
class Event:
    """Something that was done to a worker; times by ``time.monotonic``."""

    role: str
    worker: str
    trouble: Trouble
    began_s: float
    over_s: float = float("inf")


@dataclass(slots=True)
class Account:
    """The client's own books.

    Attributes:
        finished: by endpoint and outcome; ``turns``: by endpoint, route and reason.
        uncertain: of ``finished``, those that may have been counted otherwise: by endpoint,
            outcome and other outcome.
        explained: errors, by what was done to the workers.
        seen_back_after_s: the longest that requests were refused for want of a worker that was
            there again.
    """

    finished: Counts = field(default_factory=Counter)
    uncertain: Counts = field(default_factory=Counter)
    turns: Counts = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    seen_back_after_s: float = 0.0

    def sent(self) -> int:
        return sum(self.finished.values())


# How long after a trouble its errors may come: legs break at once, but that a worker is back a
# router learns from its own probes, and those take their time while another worker hangs.
_AFTER_S, _PROBES_S = 0.5, 6.5


def explain(reply: Reply, events: Sequence[Event], roles: Mapping[str, int]) -> str | None:
    """Which trouble an error comes from.

    Args:
        roles: how many workers there are of each.
    """
    messages = " ".join(str(error.get("message")) for error in reply.errors)
    for role, count in roles.items():
        if f"no {role} worker is alive" in messages:
            down = {e.worker for e in events if e.role == role and _near(e, reply, _PROBES_S)}
            return f"no {role} worker left" if len(down) == count else None
    near = [e for e in events if e.trouble is not Trouble.DRAIN and _near(e, reply, _AFTER_S)]
    if reply.status == 504:  # also of the other role: a decode worker waits for a transfer
        return "silence" if near else None
    return next((e.trouble.value for e in near if f"{e.role} worker" in messages), None)


def also(reply: Reply, events: Sequence[Event]) -> Sequence[str]:
    """As what a hang-up may have been counted, too: it came to the router in the same moment as
    the end of the answer, and nothing that the client has seen tells which was first.

    That is so where it sees ``[DONE]``, but not HTTP's end behind it; and where something was done
    to the workers just then, and an error may have been on its way.
    """
    if not reply.left or reply.whole:
        return ()
    if reply.dones:
        return (DISCONNECTED,)
    near = any(_near(event, reply, _AFTER_S) for event in events)
    return (WORKER_ERROR, TRUNCATED) if near else ()


def seen_back_after_s(reply: Reply, events: Sequence[Event]) -> float:
    """How long a router that says that no worker is left has not seen that one is."""
    messages = " ".join(str(error.get("message")) for error in reply.errors)
    role = "decode" if "no decode worker" in messages else "prefill"
    last = {e.worker: e.over_s for e in events if e.role == role and e.began_s <= reply.ended_s}
    return max(0.0, reply.ended_s - min(last.values()))


def _near(event: Event, reply: Reply, after_s: float) -> bool:
    return event.began_s <= reply.ended_s and reply.sent_s <= event.over_s + after_s


@dataclass(frozen=True, slots=True)
class Books:
    """The router's, from ``/metrics``."""

    finished: Counts
    turns: Counts
    answered: Counter[str]  # by route, as the histogram of TTFT counts them
    resumed: int
    in_flight: float
    backlog_tokens: float


def read_books(text: str) -> Books:
    finished, turns = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    answered = Counter[str]()
    sums = Counter[str]()
    for name, labels, value in parse_metrics(text):
        match name:
            case "ppd_finished_total":
                finished[labels["endpoint"], labels["outcome"]] = int(value)
            case "ppd_turns_total":
                turns[labels["endpoint"], labels["route"], labels["reason"]] = int(value)
            case "ppd_ttft_seconds_count":
                answered[labels["route"]] += int(value)
            case "ppd_streams_resumed_total" if labels["outcome"] == "ok":
                sums[name] = int(value)
            case "ppd_worker_in_flight" | "ppd_worker_backlog_tokens":
                sums[name] += int(value)
    return Books(
        finished,
        turns,
        answered,
        sums["ppd_streams_resumed_total"],
        sums["ppd_worker_in_flight"],
        sums["ppd_worker_backlog_tokens"],
    )


def settled(account: Account, books: Books) -> tuple[Counts, int]:
    """What the client has seen, where it cannot know as the router says; in how many cases."""
    mine, theirs, moved = account.finished.copy(), books.finished, 0
    for (path, seen, other), count in account.uncertain.items():
        too_many = mine[path, seen] - theirs[path, seen]
        too_few = theirs[path, other] - mine[path, other]
        here = max(0, min(count, too_many, too_few))
        mine[path, seen] -= here
        mine[path, other] += here
        moved += here
    return mine, moved


def differences(account: Account, books: Books) -> list[str]:
    """Where client and router do not say the same; [] if nowhere."""
    finished, _ = settled(account, books)
    found = [
        f"{name} {' '.join(key)}: client {mine[key]}, router {theirs[key]}"
        for name, mine, theirs in (
            ("finished", finished, books.finished),
            ("turns", account.turns, books.turns),
        )
        for key in sorted(mine.keys() | theirs.keys())
        if mine[key] != theirs[key]
    ]
    by_route = Counter[str]()
    for (_, route, _), count in account.turns.items():
        by_route[route] += count
    found += [
        f"answered {route}: client {by_route[route]}, router {books.answered[route]}"
        for route in sorted(by_route.keys() | books.answered.keys())
        if by_route[route] != books.answered[route]
    ]
    return found
