"""Which workers serve an attempt."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from ppd.contract import Role
from ppd.decision import Decision, Reason, Route
from ppd.errors import WorkerError
from ppd.placement import MAX_LOAD, Placement, PlannedTurn, opening_side, place
from ppd.prefill_times import PrefillTimes
from ppd.sessions import Hit, Turn

from .cluster import FakeCluster, FakeWorker
from .fixtures import FEATURES

TURN = PlannedTurn(
    hit=None,
    features=None,
    decision=Decision(Route.REMOTE, Reason.FIRST_TURN),
    remote_tokens=500,
    kv_tokens=700,
    root=b"a conversation..",
    single=True,
    prefill=None,
)


def workers(count: int, role: Role = Role.DECODE) -> list[FakeWorker]:
    return [FakeWorker(f"{role}{i}", role) for i in range(count)]


def seeds(count: int) -> list[int]:
    source = random.Random(0)
    return [source.getrandbits(64) for _ in range(count)]


def test_conversations_are_spread_and_those_of_others_stay_when_a_worker_leaves() -> None:
    ready = workers(4)
    before = [place(ready, None, seed=seed) for seed in seeds(2000)]
    assert min(before.count(w) for w in ready) > 400
    after = [place(ready[1:], None, seed=seed) for seed in seeds(2000)]
    moved = sum(a is not b for a, b in zip(before, after, strict=True))
    assert moved == before.count(ready[0])


def test_no_worker_gets_more_than_the_bound() -> None:
    ready = workers(4)
    for _ in range(400):
        worker = place(ready, None, seed=7)
        assert worker is not None
        worker.in_flight += 1
        mean = sum(w.in_flight for w in ready) / len(ready)
        assert worker.in_flight <= MAX_LOAD * mean + 1


def test_the_preferred_worker_is_taken_unless_it_is_avoided_or_full() -> None:
    ready = workers(4)
    other = place(ready, None, seed=7)
    home = next(w for w in ready if w is not other)
    home.in_flight = 100
    assert place(ready, home, seed=7) is home
    assert place(ready, home, avoid=[home], seed=7) is other
    home.room = False
    assert place(ready, home, tokens=10, seed=7) is other
    assert place(ready[:1], None, avoid=ready[:1]) is ready[0], "the only one, though it failed"
    assert place([], home) is None


def test_without_a_seed_the_least_busy_worker_is_taken() -> None:
    ready = workers(3)
    ready[0].in_flight, ready[1].in_flight = 2, 1
    assert place(ready, None) is ready[2]
    assert place(ready, None, avoid=[ready[2]]) is ready[1]
    assert place(ready, None, avoid=ready) is ready[2], "where all have failed, one all the same"


def test_replicas_get_their_share_of_new_conversations() -> None:
    replicas, prefill, decode = workers(1, Role.REPLICA), workers(1, Role.PREFILL), workers(2)
    roots = [seed.to_bytes(8) for seed in seeds(2000)]
    sides = [opening_side(replicas, prefill, decode, root) for root in roots]
    assert 0.2 < sides.count(Route.REPLICA) / len(sides) < 0.3  # one of four workers
    replicas[0].in_flight = 50
    assert {opening_side(replicas, prefill, decode, root) for root in roots} == {Route.REMOTE}
    assert opening_side([], prefill, decode, roots[0]) is None
    assert opening_side(replicas, [], decode, roots[0]) is Route.REPLICA


def test_a_remote_plan_names_the_prefill_worker_that_was_priced() -> None:
    cluster = FakeCluster(*workers(3, Role.PREFILL), *workers(2))
    placement = Placement(cluster, decode_fallback=False)
    for priced in cluster.ready(Role.PREFILL):
        turn = structs.replace(TURN, prefill=priced)
        plan = placement.plan(turn, turn.decision)
        assert (plan.prefill, plan.prefill_tokens, plan.workers) == (
            priced,
            500,
            (priced, plan.decode),
        )
        other = placement.plan(turn, turn.decision, failed=[priced])
        assert other.prefill is not priced
        assert other.prefill_tokens == 500, "a new conversation has nothing anywhere"
        last = Turn(1, 1, "gone", 900, 200, None, 0, 200.0)
        times = PrefillTimes(0.1, 0.0, 0.0)
        known = structs.replace(turn, hit=Hit(last, b"", 9), features=FEATURES, times=times)
        other = placement.plan(known, known.decision, failed=[priced])
        assert other.prefill_tokens == FEATURES.prompt_tokens, "what was cached is not there"
        assert known.work(other) == pytest.approx((0.1 * FEATURES.prompt_tokens, 0.0))


def test_a_full_home_is_left_for_another_decode_worker() -> None:
    cluster = FakeCluster(*workers(1, Role.PREFILL), *workers(3))
    home = cluster.of("decode1")
    known = Turn(1, 1, home.identity, 100, 10, "prefill0", 100, 10.0)
    turn = structs.replace(TURN, hit=Hit(known, b"", 9))
    placement = Placement(cluster, decode_fallback=False)
    assert placement.plan(turn, Decision(Route.REMOTE, Reason.TABLE)).decode is home
    assert placement.plan(turn, Decision(Route.REMOTE, Reason.HOME_FULL)).decode is not home


def test_where_no_prefill_worker_is_left_decode_workers_prefill_if_allowed() -> None:
    unpatched = FakeWorker("decode0", takes_appends=False)
    cluster = FakeCluster(unpatched, FakeWorker("decode1"))
    plan = Placement(cluster, decode_fallback=True).plan(TURN, TURN.decision)
    assert (plan.decode.identity, plan.route, plan.reason) == (
        "decode1",
        Route.LOCAL,
        Reason.NO_PREFILL,
    )
    assert (plan.prefill, plan.min_cached_tokens, plan.prefill_tokens) == (None, 0, 500)
    batch = structs.replace(TURN, single=False)
    for placement, turn in (
        (Placement(cluster, decode_fallback=False), TURN),
        (Placement(cluster, decode_fallback=True), batch),
    ):
        with pytest.raises(WorkerError, match="no prefill worker is alive"):
            placement.plan(turn, turn.decision)


@pytest.mark.parametrize(
    ("gone", "decided", "taken"),
    [
        ((), Route.REMOTE, Route.REMOTE),
        ((), Route.REPLICA, Route.REPLICA),
        ((Role.REPLICA,), Route.REPLICA, Route.REMOTE),
        ((Role.PREFILL,), Route.REMOTE, Route.REPLICA),
        ((Role.DECODE,), Route.REMOTE, Route.REPLICA),
    ],
)
def test_a_turn_goes_to_the_side_that_is_left(
    gone: tuple[Role, ...], decided: Route, taken: Route
) -> None:
    cluster = FakeCluster(*(w for role in Role for w in workers(2, role)))
    for worker in cluster.workers:
        worker.ready = worker.role not in gone
    decision = Decision(decided, Reason.FIRST_TURN)
    plan = Placement(cluster, decode_fallback=False).plan(TURN, decision)
    assert (plan.route, plan.reason) == (taken, Reason.FIRST_TURN)
    assert (plan.prefill is None) is (taken is Route.REPLICA)
