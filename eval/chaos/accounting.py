"""What clients received of their requests, and whether the router's counts agree.

It does no I/O: replies go in, outcomes and differences come out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from ppd.outcome import Outcome

from ..dialects import text_in, text_of
from ..http_stream import Reply
from ..prometheus import parse_metrics

NO_END = "no_end"  # an answer that just stops; the router counts no such outcome

Counts = Counter[tuple[str, ...]]


def outcome_of(reply: Reply) -> str:
    """Return the outcome of a request, from all that its client received.

    A client that has hung up by ``HangUp.HALF`` still receives what was under way. If that is the
    end of the answer, the answer had ended before. See :func:`other_outcomes`, too.
    """
    if not reply.whole and not (reply.left and reply.dones):
        return Outcome.DISCONNECTED if reply.left else NO_END
    if reply.status != 200:
        kind = reply.errors[0].get("type") if reply.errors else None
        if kind == "router_error":
            return Outcome.INTERNAL_ERROR
        if reply.status == 429:
            return Outcome.OVERLOADED
        return Outcome.REJECTED if reply.status < 500 else Outcome.WORKER_ERROR
    if not reply.streams:
        return Outcome.OK
    if errors := reply.errors:
        ours = errors[-1].get("type") == "worker_error" and errors[-1].get("code") == 502
        return Outcome.TRUNCATED if ours else Outcome.WORKER_ERROR
    complete = reply.dones == 1 and reply.body.endswith(b"data: [DONE]\n\n")
    return Outcome.OK if complete else NO_END


def problem_of(path: str, number: int, words: int, outcome: str, reply: Reply) -> str | None:
    """Return what is wrong with an answer, whatever its outcome; None if nothing is.

    Args:
        number, words: of the request; they determine the text of its answer.
    """
    if reply.status != 200:
        return None if outcome == Outcome.DISCONNECTED or reply.errors else "an error without words"
    if len(reply.errors) > 1:
        return "two errors in one stream"
    values = [value for value in reply.values if "error" not in value]
    received, expected = text_in(path, values), text_of(number, words)
    if outcome == Outcome.OK and received != expected:
        return f"not its own words: {received!r}"
    if not expected.startswith(received):
        return f"not the beginning of its own words: {received!r}"
    return None


class Disruption(StrEnum):
    """What is done to a worker."""

    KILL = "kill"
    STOP = "stop"
    FLAP = "flap"
    DRAIN = "drain"


@dataclass(slots=True)
class Injection:
    """One disruption of one worker.

    Attributes:
        began_s, over_s: by ``time.monotonic``.
    """

    role: str
    worker: str
    disruption: Disruption
    began_s: float
    over_s: float = float("inf")


@dataclass(slots=True)
class ClientCounts:
    """What the clients of a run have counted.

    Attributes:
        finished: requests, by endpoint and outcome.
        turns: answered turns, by endpoint, route and reason.
        streams: of these, those whose answer streamed, by route.
        uncertain: requests of ``finished`` that the router may have counted otherwise: by
            endpoint, outcome and other outcome.
        explained: errors, by the disruption that caused them.
        unexplained: descriptions of all that should not have happened.
        seen_back_after_s: the longest time that the router refused requests for lack of a worker
            that was there again.
    """

    finished: Counts = field(default_factory=Counter)
    uncertain: Counts = field(default_factory=Counter)
    turns: Counts = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    seen_back_after_s: float = 0.0


# How long after a disruption its errors may come. Legs break at once. That a worker is back, a
# router's own probes find out, and those take their time while another worker hangs.
_AFTER_S, _PROBES_S = 0.5, 6.5


def explain(reply: Reply, injections: Sequence[Injection], roles: Mapping[str, int]) -> str | None:
    """Return the disruption that an error comes from, or None.

    Args:
        roles: how many workers of each role there are.
    """
    messages = _messages(reply)
    for role, count in roles.items():
        if f"no {role} worker is alive" in messages:
            down = {e.worker for e in injections if e.role == role and _near(e, reply, _PROBES_S)}
            return f"no {role} worker left" if len(down) == count else None
    near = [
        event
        for event in injections
        if event.disruption is not Disruption.DRAIN and _near(event, reply, _AFTER_S)
    ]
    if reply.status == 504:  # also of the other role: a decode worker waits for a transfer
        return "silence" if near else None
    return next((e.disruption.value for e in near if f"{e.role} worker" in messages), None)


def other_outcomes(reply: Reply, injections: Sequence[Injection]) -> Sequence[str]:
    """Return the outcomes that the router may have counted for a hang-up, besides the client's.

    The hang-up may have reached the router when it had sent the end of the stream, which the client
    then did not read. If a worker was disrupted just then, that end may have been an error.
    """
    if not reply.left or reply.whole:
        return ()
    if reply.dones:
        return (Outcome.DISCONNECTED,)
    near = any(_near(event, reply, _AFTER_S) for event in injections)
    sent = (Outcome.OK,) if reply.streams else ()
    return (*sent, Outcome.WORKER_ERROR, Outcome.TRUNCATED) if near else sent


def recovery_delay_s(reply: Reply, injections: Sequence[Injection]) -> float:
    """Return how long a worker was back when the router still refused for lack of one."""
    role = "decode" if "no decode worker" in _messages(reply) else "prefill"
    last = {e.worker: e.over_s for e in injections if e.role == role and e.began_s <= reply.ended_s}
    return max(0.0, reply.ended_s - min(last.values()))


def _messages(reply: Reply) -> str:
    return " ".join(str(error.get("message")) for error in reply.errors)


def _near(event: Injection, reply: Reply, after_s: float) -> bool:
    return event.began_s <= reply.ended_s and reply.sent_s <= event.over_s + after_s


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What the router has counted, from ``/metrics``.

    Attributes:
        finished, turns: as :class:`ClientCounts` has them.
        streams: as :class:`ClientCounts` has them, by the histogram of TTFT.
        resumed: streams that went on at another worker.
        in_flight, backlog_tokens: of all workers together.
    """

    finished: Counts
    turns: Counts
    streams: Counter[str]
    resumed: int
    in_flight: float
    backlog_tokens: float


def parse_router_counts(text: str) -> RouterCounts:
    """Read the counts out of a router's metrics."""
    finished, turns = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    streams, sums = Counter[str](), Counter[str]()
    for name, labels, value in parse_metrics(text):
        match name:
            case "ppd_finished_total":
                finished[labels["endpoint"], labels["outcome"]] = int(value)
            case "ppd_turns_total":
                turns[labels["endpoint"], labels["route"], labels["reason"]] = int(value)
            case "ppd_ttft_seconds_count":
                streams[labels["route"]] += int(value)
            case "ppd_streams_resumed_total" if labels["outcome"] == Outcome.OK:
                sums[name] = int(value)
            case "ppd_worker_in_flight" | "ppd_worker_backlog_tokens":
                sums[name] += int(value)
    return RouterCounts(
        finished,
        turns,
        streams,
        sums["ppd_streams_resumed_total"],
        sums["ppd_worker_in_flight"],
        sums["ppd_worker_backlog_tokens"],
    )


def reconciled(clients: ClientCounts, router: RouterCounts) -> tuple[Counts, int]:
    """Move uncertain requests to the outcomes that the router has counted.

    A request that is moved may take the place of another one, which is moved on: one was counted
    as disconnected and not as answered, another one as truncated and not as disconnected.

    Returns:
        The clients' finished requests, and how many were moved.
    """
    mine, free = clients.finished.copy(), Counter(clients.uncertain)
    moved = 0
    for path, outcome in sorted(mine):
        while mine[path, outcome] > router.finished[path, outcome]:
            steps = _way_to_too_few(path, outcome, mine, router.finished, free)
            if not steps:
                break
            for seen, other in pairwise((outcome, *steps)):
                free[path, seen, other] -= 1
                free[path, other, seen] += 1  # it may be moved back for another one
            mine[path, outcome] -= 1
            mine[path, steps[-1]] += 1
            moved += len(steps)
    return mine, moved


def _way_to_too_few(
    path: str, outcome: str, mine: Counts, theirs: Counts, free: Counts
) -> tuple[str, ...]:
    """The moves to the nearest outcome that the clients have counted too seldom; () if none."""
    ways: deque[tuple[str, ...]] = deque([()])
    reached = {outcome}
    while ways:
        way = ways.popleft()
        at = way[-1] if way else outcome
        if mine[path, at] < theirs[path, at]:
            return way
        for (endpoint, seen, other), count in free.items():
            if count > 0 and endpoint == path and seen == at and other not in reached:
                reached.add(other)
                ways.append((*way, other))
    return ()


def differences(clients: ClientCounts, router: RouterCounts) -> list[str]:
    """Describe where clients and router have counted differently; [] if nowhere."""
    finished, _ = reconciled(clients, router)
    found = [
        f"{name} {' '.join(key)}: client {mine[key]}, router {theirs[key]}"
        for name, mine, theirs in (
            ("finished", finished, router.finished),
            ("turns", clients.turns, router.turns),
        )
        for key in sorted(mine.keys() | theirs.keys())
        if mine[key] != theirs[key]
    ]
    found += [
        f"streams {route}: client {clients.streams[route]}, router {router.streams[route]}"
        for route in sorted(clients.streams.keys() | router.streams.keys())
        if clients.streams[route] != router.streams[route]
    ]
    return found
