"""Replicas that admit turns at the same time do not exceed the stated bound together."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.backlog import Backlog, Queued
from ppd.placement import place
from ppd.shared_load import SharedLoad
from ppd.shared_records import LoadRecord

from .cluster import FakeWorker

BUDGET, MAX_TURN = 400, 20
VISIBLE_S, SILENT_S = 0.1, 5.0
EVERYONE = 6  # a step from this number on is taken by all replicas
WORKER = "http://d:1#boot.0"


@dataclass
class Entry:
    at_s: float
    origin: int
    loads: tuple[LoadRecord, ...]


@dataclass
class Replica:
    number: int
    own: Backlog = field(default_factory=Backlog)
    turns: list[Queued] = field(default_factory=list)
    position: int = 0  # in the stream

    def __post_init__(self) -> None:
        self.load = SharedLoad(VISIBLE_S, SILENT_S)
        self.load.follow(self.own)

    def admits(self, tokens: int, now_s: float) -> bool:
        """The rule of the ``reservation`` correction."""
        if self.load.claimed(WORKER, now_s) + tokens > BUDGET:
            return False
        self.turns.append(self.own.add(WORKER, tokens))
        return True

    def finish(self, number: int) -> None:
        if self.turns:
            self.own.remove(self.turns.pop(number % len(self.turns)))


@dataclass
class Fleet:
    """Replicas and the stream between them; every entry is read within ``VISIBLE_S``."""

    replicas: list[Replica]
    connected: bool = True
    stream: list[Entry] = field(default_factory=list)
    now_s: float = 0.0

    def publish(self, one: Replica, *, acknowledged: bool) -> None:
        loads = one.load.publish()
        if not self.connected:
            return
        self.stream.append(Entry(self.now_s, one.number, loads))
        if acknowledged:
            one.load.written((len(self.stream), 0), self.now_s)

    def read(self, one: Replica, until: int) -> None:
        if not self.connected:
            return
        for entry in self.stream[one.position : until]:
            if entry.origin != one.number:
                one.load.read(str(entry.origin).encode(), entry.loads, self.now_s)
        one.position = max(one.position, until)
        one.load.read_until((one.position, 0), self.now_s)

    def advance(self, seconds: float) -> None:
        """Let time pass; what would be read too late is read before."""
        ends_s = self.now_s + seconds
        for one in self.replicas:
            due = [i for i, entry in enumerate(self.stream) if entry.at_s + VISIBLE_S < ends_s]
            self.read(one, due[-1] + 1 if due else 0)
        self.now_s = ends_s

    @property
    def tokens(self) -> int:
        return sum(one.own.of(WORKER) for one in self.replicas)


def fleet(count: int) -> Fleet:
    """Replicas that have read of each other, as after a start."""
    one = Fleet([Replica(number) for number in range(count)])
    for replica in one.replicas:
        one.publish(replica, acknowledged=True)
    one.advance(2 * VISIBLE_S)
    return one


def bound(n: int) -> float:
    return (2 - 1 / n) * BUDGET + (n - 1) * (1 - 1 / n) * MAX_TURN


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["admit", "fill", "fill", "finish", "end", "publish", "publish", "lost", "read", "wait"]
        ),
        st.integers(0, 2 * EVERYONE),
        st.integers(1, MAX_TURN),
    ),
    min_size=5,
    max_size=40,
)


def play(one: Fleet, steps: list[tuple[str, int, int]]) -> int:
    """Take the steps, and return the largest number of tokens that were reserved together."""
    most = 0
    for kind, number, amount in steps:
        everyone = number >= EVERYONE
        for replica in one.replicas if everyone else [one.replicas[number % len(one.replicas)]]:
            most = max(most, take(one, replica, kind, amount))
        if kind == "wait":
            one.advance(amount / MAX_TURN * VISIBLE_S)
    return most


def take(one: Fleet, replica: Replica, kind: str, amount: int) -> int:
    """Take one step of one replica, and return the tokens of all."""
    match kind:
        case "admit":
            replica.admits(amount, one.now_s)
        case "fill":
            while replica.admits(amount, one.now_s):
                pass
        case "end":
            while replica.turns:
                replica.finish(0)
        case "finish":
            replica.finish(amount)
        case "publish":
            one.publish(replica, acknowledged=True)
        case "lost":  # the store has taken it, and the answer was lost
            one.publish(replica, acknowledged=False)
        case "read":
            one.read(replica, len(one.stream))
    return one.tokens


@given(st.integers(2, 6), _STEPS)
@settings(max_examples=1000)
def test_all_replicas_together_stay_within_the_bound(
    count: int, steps: list[tuple[str, int, int]]
) -> None:
    assert play(fleet(count), steps) <= bound(count)


@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 7), st.integers(1, MAX_TURN))))
def test_a_burst_at_all_replicas_at_once(count: int, turns: list[tuple[int, int]]) -> None:
    """Nothing is read in between: each takes its share of the budget, and one turn more."""
    one = fleet(count)
    for number, tokens in turns:
        one.replicas[number % count].admits(tokens, one.now_s)
    assert one.tokens <= BUDGET + count * MAX_TURN


@given(st.integers(2, 6), _STEPS)
def test_replicas_that_are_cut_off_keep_to_their_shares(
    count: int, steps: list[tuple[str, int, int]]
) -> None:
    """The number of replicas that was known last stays in force without the store."""
    one = fleet(count)
    one.connected = False
    one.advance(10 * SILENT_S)
    assert play(one, [step for step in steps if step[0] != "lost"]) <= BUDGET + count * MAX_TURN


def test_without_sharing_the_burst_is_as_many_budgets_as_replicas() -> None:
    """What the bound is worth: the same rule without the others' tokens."""
    alone = [Replica(number) for number in range(4)]
    for one in alone:
        while one.admits(MAX_TURN, 0.0):
            pass
    assert sum(one.own.of(WORKER) for one in alone) == 4 * BUDGET
    together = fleet(4)
    for one in together.replicas:
        while one.admits(MAX_TURN, together.now_s):
            pass
    assert together.tokens <= BUDGET + 4 * MAX_TURN


def test_one_replica_has_the_whole_budget_while_the_others_have_nothing() -> None:
    one = fleet(4)
    first = one.replicas[0]
    while one.tokens + MAX_TURN <= BUDGET:
        assert first.admits(MAX_TURN, one.now_s)
        one.publish(first, acknowledged=True)
        one.advance(VISIBLE_S)
        one.advance(VISIBLE_S)
    assert one.tokens == BUDGET
    assert not one.replicas[1].admits(1, one.now_s)


def test_a_replica_that_has_ended_holds_no_tokens() -> None:
    one = fleet(2)
    first, second = one.replicas
    assert first.admits(MAX_TURN, one.now_s)
    one.publish(first, acknowledged=True)
    one.advance(2 * VISIBLE_S)
    assert second.load.claimed(WORKER, one.now_s) == MAX_TURN
    one.advance(SILENT_S)
    one.advance(1.0)
    assert second.load.routers == 1
    assert second.load.claimed(WORKER, one.now_s) == 0


def test_a_reader_that_does_not_read_its_own_entries_is_stale() -> None:
    one = fleet(3)
    first = one.replicas[0]
    assert first.admits(MAX_TURN, one.now_s)
    one.publish(first, acknowledged=True)
    one.now_s += VISIBLE_S * 1.5  # nothing is read
    assert first.load.is_stale(one.now_s)
    assert first.load.claimed(WORKER, one.now_s) == 3 * MAX_TURN
    one.advance(VISIBLE_S)
    assert not first.load.is_stale(one.now_s)
    assert first.load.claimed(WORKER, one.now_s) == MAX_TURN


def test_a_second_burst_after_all_turns_have_ended() -> None:
    """The others have read that nothing is left; the snapshot before it is still the older one."""
    steps = [
        *[("fill", EVERYONE, 20), ("publish", EVERYONE, 1), ("wait", 0, 20), ("wait", 0, 20)],
        *[("end", EVERYONE, 1), ("publish", EVERYONE, 1), ("read", EVERYONE, 1)],
        ("fill", EVERYONE, 20),
    ]
    assert play(fleet(4), steps) <= bound(4)


@given(
    st.integers(1, 4), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)))
)
def test_new_conversations_of_all_routers_are_spread_without_sharing(
    count: int, size: int, openings: list[tuple[int, int]]
) -> None:
    """Each router sees its own requests only, and many conversations have the same opening."""
    routers = [[FakeWorker(f"d{i}", in_flight=0) for i in range(size)] for _ in range(count)]
    for number, seed in openings * 4:
        worker = place(routers[number % count], None, seed=seed)
        assert worker is not None
        worker.in_flight += 1
    mean = sum(worker.in_flight for workers in routers for worker in workers) / size
    for i in range(size):
        assert sum(workers[i].in_flight for workers in routers) <= 1.25 * mean + 2.25 * count


def test_what_others_have_read_is_not_kept() -> None:
    """Nor without others: a process that runs for days keeps as little as one of a minute."""
    for count in (1, 2):
        one = fleet(count)
        first = one.replicas[0]
        for _ in range(200):
            first.turns.append(first.own.add(WORKER, 1))
            one.publish(first, acknowledged=True)
            one.advance(VISIBLE_S)
            one.read(first, len(one.stream))
        assert first.load.kept <= 3
