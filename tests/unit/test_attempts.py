"""What is done for a request, and what after each failure; without sockets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ppd.attempts import Attempts, blames_worker
from ppd.backlog import Backlog
from ppd.contract import Refusal, RefusalReason, Role
from ppd.decision import Decision, Reason, Route
from ppd.effects import (
    Abandon,
    Answered,
    Append,
    Cause,
    ClientGone,
    Crashed,
    Effect,
    Event,
    Failed,
    Failure,
    Finish,
    Note,
    PassageFound,
    Prefilled,
    PrefillFailed,
    Prime,
    Primed,
    Relay,
    Send,
    Settled,
    Stopping,
    StreamBroke,
    StreamEnded,
    StreamFailed,
)
from ppd.errors import EngineError
from ppd.outcome import Outcome
from ppd.placement import Placement, Plan, PlannedTurn, WorkerView
from ppd.prefill_times import PrefillTimes
from ppd.sessions import Hit, Turn

from .cluster import FakeCluster, FakeWorker
from .fixtures import FEATURES

KNOWN = Turn(1, 1, "d0", 900, 200, "p0", 900, 200.0)


def failure(cause: Cause, status: int = 502, **more: object) -> Failure:
    return Failure(cause, EngineError("it failed", status=status), **more)  # type: ignore[arg-type]


LOST, SILENT = failure(Cause.LOST), failure(Cause.SILENT, 504)
UNCONNECTED, TRANSFER = failure(Cause.UNCONNECTED), failure(Cause.TRANSFER, 500)
BROKEN, BUSY = failure(Cause.ANSWERED, 500), failure(Cause.ANSWERED, 503)
REJECTED, OVERLOADED = failure(Cause.ANSWERED, 400), failure(Cause.ANSWERED, 429)
REFUSED = failure(Cause.ANSWERED, 503, refusal=Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS))
UNPATCHED = failure(Cause.ANSWERED, 400, unpatched=True)
FAILURES = (LOST, SILENT, UNCONNECTED, TRANSFER, BROKEN, BUSY, REJECTED, OVERLOADED, REFUSED)
# How the fault table of the router's documents blames: a busy worker, a client's error and a
# failed transfer count against nobody.
BLAMING = (LOST, SILENT, UNCONNECTED, BROKEN)


@dataclass(slots=True)
class World:
    """One request and the cluster that it meets."""

    cluster: FakeCluster
    attempts: Attempts
    backlog: Backlog
    turn: PlannedTurn
    placement: Placement

    def on(self, *events: Event) -> Effect:
        effect: Effect = Note()
        for event in events:
            effect = self.attempts.on(event, 0.0)
        return effect

    def held(self) -> int:
        """Tokens that the request holds anywhere."""
        workers = self.cluster.workers
        queued = sum(self.backlog.of(worker.identity) for worker in workers)
        return queued + sum(worker.headroom.reserved_tokens for worker in workers)


def world(
    route: Route = Route.REMOTE,
    *,
    prefill: int = 2,
    decode: int = 2,
    replica: int = 0,
    appends: bool = True,
    decode_fallback: bool = False,
    max_resumptions: int = 0,
) -> World:
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.REPLICA: replica}
    cluster = FakeCluster(
        *(
            FakeWorker(f"{role.value[0]}{i}", role, takes_appends=appends)
            for role, count in counts.items()
            for i in range(count)
        )
    )
    reasons = {
        Route.LOCAL: Reason.POLICY_FULL,
        Route.REMOTE: Reason.POLICY_PD,
        Route.REPLICA: Reason.POLICY_REPLICA,
    }
    turn = PlannedTurn(
        hit=Hit(KNOWN, b"", 9),
        features=FEATURES,
        decision=Decision(route, reasons[route]),
        remote_tokens=300,
        kv_tokens=1000,
        root=b"a conversation..",
        single=True,
        prefill=cluster.find("p0"),
    )
    placement = Placement(cluster, decode_fallback=decode_fallback)
    backlog = Backlog()
    attempts = Attempts(turn, placement, backlog, number=7, max_resumptions=max_resumptions)
    return World(cluster, attempts, backlog, turn, placement)


def names(plan: Plan) -> list[str]:
    return [worker.identity for worker in plan.workers]


# -- a request that meets no failure ------------------------------------------------------


def test_a_remote_turn() -> None:
    it = world()
    sent = it.attempts.start()
    assert isinstance(sent, Send)
    assert names(sent.plan) == ["p0", "d0"]
    assert (it.backlog.of("p0"), it.backlog.of("d0")) == (300, 0)
    assert it.cluster.of("d0").headroom.reserved_tokens == 1000
    assert it.on(Prefilled()) == Note(credited=it.cluster.of("p0"))
    assert it.backlog.of("p0") == 0
    assert it.attempts.on(Answered(streams=True), 5.0) == Relay(sent.plan, credited=None)
    assert it.attempts.answered_at_s == 5.0
    assert it.on(StreamEnded()) == Finish(Outcome.OK, credited=it.cluster.of("d0"))
    assert (it.held(), it.attempts.outcome) == (0, Outcome.OK)


def test_a_local_turn_is_reserved_at_home_until_it_is_answered() -> None:
    it = world(Route.LOCAL)
    sent = it.attempts.start()
    assert isinstance(sent, Send)
    assert names(sent.plan) == ["d0"]
    assert sent.plan.min_cached_tokens == FEATURES.min_cached_tokens
    assert it.backlog.of("d0") == FEATURES.uncached_at_home
    assert it.on(Answered(streams=False)) == Relay(sent.plan, credited=it.cluster.of("d0"))
    assert it.backlog.of("d0") == 0


def test_the_prefill_leg_may_end_after_the_first_token() -> None:
    it = world()
    it.attempts.start()
    it.on(Answered(streams=True))
    assert it.backlog.of("p0") == 300
    late = it.on(PrefillFailed(BROKEN))
    assert late == Note(None, it.cluster.of("p0"), BROKEN, blamed=True)
    assert it.on(StreamEnded()) == Finish(Outcome.OK, credited=it.cluster.of("d0"))


# -- one failure, by its cause ------------------------------------------------------------


@pytest.mark.parametrize("fails", FAILURES)
def test_who_is_blamed_and_what_is_probed(fails: Failure) -> None:
    it = world()
    it.attempts.start()
    effect = it.on(Failed(fails))
    if fails is SILENT:  # it waits for KV that never came
        assert isinstance(effect, Abandon)
        assert (effect.worker.identity, effect.blamed) == ("p0", True)
        return
    assert isinstance(effect, Abandon)
    assert (effect.worker.identity, effect.reason) == ("d0", fails)
    assert effect.blamed is (fails in BLAMING)
    assert effect.down is (fails is UNCONNECTED)
    probed = {LOST: ["d0"], TRANSFER: ["p0", "d0"]}.get(fails, [])
    assert [worker.identity for worker in effect.probe] == probed
    assert it.held() == 0, "nothing is held while no attempt is under way"


def test_a_decode_worker_that_is_silent_after_the_prefill_is_to_blame_itself() -> None:
    it = world()
    it.attempts.start()
    effect = it.on(Prefilled(), Failed(SILENT))
    assert isinstance(effect, Abandon)
    assert (effect.worker.identity, effect.blamed) == ("d0", True)


def test_a_leg_that_is_silent_because_the_other_failed_blames_nobody() -> None:
    for first, second in ((Failed(BROKEN), PrefillFailed(SILENT)), (PrefillFailed(LOST), SILENT)):
        it = world()
        it.attempts.start()
        it.on(first)
        event = Failed(second) if isinstance(second, Failure) else second
        assert it.on(event) == Note()


@pytest.mark.parametrize(
    ("fails", "again", "outcome"),
    [
        (LOST, True, Outcome.WORKER_ERROR),
        (TRANSFER, True, Outcome.WORKER_ERROR),
        (BROKEN, True, Outcome.WORKER_ERROR),
        (BUSY, True, Outcome.WORKER_ERROR),
        (REJECTED, False, Outcome.REJECTED),
        (OVERLOADED, False, Outcome.OVERLOADED),
    ],
)
def test_what_is_sent_once_more(fails: Failure, again: bool, outcome: Outcome) -> None:
    it = world()
    it.attempts.start()
    it.on(Failed(fails))
    effect = it.on(Settled())
    if again:
        assert isinstance(effect, Send)
        assert effect.plan.decode.identity == ("d0" if fails is TRANSFER else "d1")
        it.on(Failed(fails))
        effect = it.on(Settled())
    assert effect == Finish(outcome, fails.error)
    assert it.attempts.retried is again


def test_a_worker_that_fails_alone_is_not_asked_again() -> None:
    it = world(decode=1)
    it.attempts.start()
    it.on(Failed(BROKEN))
    assert it.on(Settled()) == Finish(Outcome.WORKER_ERROR, BROKEN.error)


def test_where_nothing_was_sent_every_worker_is_tried() -> None:
    it = world(decode=3)
    effect = it.attempts.start()
    tried = []
    while isinstance(effect, Send):
        worker = effect.plan.decode
        assert isinstance(worker, FakeWorker)
        tried.append(worker.identity)
        abandoned = it.on(Failed(UNCONNECTED))
        assert isinstance(abandoned, Abandon)
        assert abandoned.down
        worker.ready = False
        effect = it.on(Settled())
    assert sorted(tried) == ["d0", "d1", "d2"]
    assert isinstance(effect, Finish)
    assert effect.outcome is Outcome.WORKER_ERROR
    assert "no decode worker is alive" in str(effect.error)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (REFUSED, Reason.REFUSED_BY_WORKER),
        (UNPATCHED, Reason.HOME_UNPATCHED),
        (LOST, Reason.HOME_GONE),
        (UNCONNECTED, Reason.HOME_GONE),
        (BROKEN, Reason.HOME_GONE),
    ],
)
def test_a_local_turn_that_failed_goes_remote(fails: Failure, reason: Reason) -> None:
    it = world(Route.LOCAL)
    it.attempts.start()
    abandoned = it.on(Failed(fails))
    assert isinstance(abandoned, Abandon)
    assert abandoned.local
    effect = it.on(Settled())
    assert isinstance(effect, Send)
    assert (effect.plan.route, effect.plan.reason) == (Route.REMOTE, reason)
    assert it.backlog.of("p0") == 300
    home_stays = fails in (REFUSED, UNPATCHED, UNCONNECTED)
    assert (effect.plan.decode.identity == "d0") is home_stays
    assert it.attempts.retried is not home_stays


@pytest.mark.parametrize("fails", [REJECTED, OVERLOADED])
def test_a_local_turn_that_would_fail_anywhere_does_not_go_remote(fails: Failure) -> None:
    it = world(Route.LOCAL)
    it.attempts.start()
    it.on(Failed(fails))
    assert it.on(Settled()) == Finish(fails.error.outcome, fails.error)


def test_a_lost_replica_is_replaced_by_prefill_and_decode() -> None:
    it = world(Route.REPLICA, replica=1)
    it.attempts.start()
    it.on(Failed(LOST))
    it.cluster.of("r0").ready = False
    effect = it.on(Settled())
    assert isinstance(effect, Send)
    assert (effect.plan.route, effect.plan.reason) == (Route.REMOTE, Reason.POLICY_REPLICA)


def test_a_failed_prefill_worker_is_replaced_by_the_fallback() -> None:
    it = world(prefill=1, decode_fallback=True)
    it.attempts.start()
    it.on(PrefillFailed(BROKEN))
    effect = it.on(Settled())
    assert isinstance(effect, Send)
    assert (effect.plan.route, effect.plan.reason) == (Route.LOCAL, Reason.NO_PREFILL)
    assert it.backlog.of("d0") == 300


# -- streams ------------------------------------------------------------------------------


def test_a_stream_that_broke_off_goes_on_as_often_as_allowed() -> None:
    it = world(max_resumptions=1)
    it.attempts.start()
    it.on(Prefilled(), Answered(streams=True))
    broke = it.on(StreamBroke(resumable=True))
    assert broke == Abandon(it.cluster.of("d0"), None, blamed=True)
    effect = it.on(Settled())
    assert isinstance(effect, Send)
    assert (effect.plan.decode.identity, effect.plan.reason) == ("d1", Reason.RESUMED)
    it.on(Answered(streams=True))
    end = it.on(StreamBroke(resumable=True))
    assert end == Finish(Outcome.TRUNCATED, blamed=it.cluster.of("d1"))


def test_a_stream_that_cannot_go_on_is_truncated() -> None:
    it = world(max_resumptions=3)
    it.attempts.start()
    it.on(Answered(streams=True))
    assert isinstance(it.on(StreamBroke(resumable=False)), Finish)
    it = world(max_resumptions=3)
    it.attempts.start()
    it.on(Answered(streams=True), StreamBroke(resumable=True), Settled(), Failed(BROKEN))
    assert it.on(Settled()) == Finish(Outcome.TRUNCATED, BROKEN.error), "no other worker is left"


def test_an_engine_that_ends_a_stream_with_an_error() -> None:
    for event, blamed in ((StreamEnded(well=False), False), (StreamFailed(), True)):
        it = world()
        it.attempts.start()
        it.on(Answered(streams=True))
        end = it.on(event)
        assert isinstance(end, Finish)
        assert (end.outcome, end.blamed is not None) == (Outcome.WORKER_ERROR, blamed)


def test_a_stream_goes_on_behind_a_passage() -> None:
    it = world()
    it.attempts.start()
    it.on(Prefilled(), Answered(streams=True))
    home = it.cluster.of("d0")
    assert it.on(PassageFound()) == Prime(home, FEATURES.min_cached_tokens)
    effect = it.on(Primed())
    assert isinstance(effect, Append)
    assert (effect.passage, effect.plan.decode, effect.plan.reason) == (
        True,
        home,
        Reason.APPENDED,
    )
    assert isinstance(it.on(Answered(streams=True)), Relay)


def test_a_passage_is_given_up_when_no_worker_takes_the_rest_behind_it() -> None:
    it = world(prefill=1, decode=1)
    it.attempts.start()
    it.on(Prefilled(), Answered(streams=True), PassageFound(), Primed())
    it.on(Failed(BROKEN))
    elsewhere = it.on(Settled())
    assert isinstance(elsewhere, Send)
    assert elsewhere.plan.reason is Reason.RESUMED
    it.on(Failed(BROKEN))
    without = it.on(Settled())
    assert isinstance(without, Append)
    assert (without.passage, without.plan.decode.identity) == (False, "d0")
    it.on(Failed(REJECTED), Settled(), Failed(REJECTED))
    assert it.on(Settled()) == Finish(Outcome.TRUNCATED, REJECTED.error)


def test_the_rest_of_a_stream_must_stream() -> None:
    it = world(max_resumptions=1)
    it.attempts.start()
    it.on(Answered(streams=True), StreamBroke(resumable=True), Settled())
    effect = it.on(Answered(streams=False))
    assert isinstance(effect, Abandon)
    assert (effect.worker.identity, effect.blamed) == ("d1", True)


def test_the_prefill_worker_of_a_turn_is_kept_behind_a_passage_but_not_elsewhere() -> None:
    it = world(max_resumptions=1)
    it.attempts.start()
    seen = [it.attempts.prefill]
    it.on(Answered(streams=True), PassageFound(), Primed(), Answered(streams=True))
    seen.append(it.attempts.prefill)
    it.on(StreamBroke(resumable=True), Settled())
    assert [*seen, it.attempts.prefill] == [None, it.cluster.of("p0"), None]


def test_an_append_that_is_lost_goes_on_elsewhere_at_once() -> None:
    it = world()
    it.attempts.start()
    it.on(Answered(streams=True), PassageFound(), Primed())
    effect = it.on(Failed(LOST))
    assert isinstance(effect, Abandon)
    assert effect.probe == ()


def test_the_decision_is_that_of_the_attempt_or_of_the_one_that_was_wanted() -> None:
    it = world(Route.LOCAL, prefill=1)
    it.attempts.start()
    it.on(Failed(LOST))
    it.cluster.of("p0").ready = False
    end = it.on(Settled())
    assert isinstance(end, Finish)
    decision = it.attempts.decision
    assert (decision.route, decision.reason) == (Route.REMOTE, Reason.HOME_GONE)
    assert end.error is not None
    assert end.error.__traceback__ is None, "its frames would hold the request in a cycle"


def test_a_worker_without_appends_is_not_asked_to_go_on() -> None:
    it = world(Route.REPLICA, prefill=0, decode=0, replica=1, appends=False)
    it.attempts.start()
    it.on(Answered(streams=True), PassageFound())
    effect = it.on(Primed())
    assert isinstance(effect, Append)
    assert (effect.plan.route, effect.plan.reason) == (Route.REPLICA, Reason.RESUMED)


def test_a_passage_that_comes_when_the_stream_is_over_is_dropped() -> None:
    it = world(max_resumptions=1)
    it.attempts.start()
    it.on(Answered(streams=True), PassageFound(), StreamBroke(resumable=True))
    assert it.on(Primed()) == Note()
    assert isinstance(it.on(Settled()), Send)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (ClientGone(), Outcome.DISCONNECTED),
        (Stopping(), Outcome.STOPPED),
        (Crashed(), Outcome.INTERNAL_ERROR),
    ],
)
def test_a_request_can_end_at_any_time(event: Event, outcome: Outcome) -> None:
    for events in (
        (),
        (Answered(streams=True),),
        (Failed(LOST),),
        (Answered(streams=True), PassageFound(), Primed()),
    ):
        it = world()
        it.attempts.start()
        it.on(*events)
        assert it.on(event) == Finish(outcome)
        assert it.held() == 0
        assert it.on(Settled(), Answered(streams=True), ClientGone()) == Note()


# -- any sequence of events ---------------------------------------------------------------


def _events_after(effect: Effect, relaying: bool, open_prefill: bool) -> list[Event]:
    """What can happen next."""
    events: list[Event] = [ClientGone(), Stopping()]
    match effect:
        case Abandon():
            return [Settled(), *([PrefillFailed(LOST), PrefillFailed(SILENT)] * open_prefill)]
        case Send() | Append() | Note() if not relaying:
            events += [Answered(streams=True), Answered(streams=False)]
            events += [Failed(one) for one in (*FAILURES, UNPATCHED)] * 2
    if relaying:
        events += [StreamEnded(), StreamEnded(well=False), StreamFailed(), PassageFound()]
        events += [StreamBroke(resumable=True), StreamBroke(resumable=False)] * 2
        if isinstance(effect, Prime):
            events += [Primed()] * 4
    if open_prefill:
        events += [Prefilled(), PrefillFailed(BROKEN), PrefillFailed(LOST), PrefillFailed(SILENT)]
    return events


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_every_sequence_of_events_ends_once_and_gives_everything_back(data: st.DataObject) -> None:
    it = world(
        data.draw(st.sampled_from([Route.LOCAL, Route.REMOTE, Route.REPLICA])),
        prefill=data.draw(st.integers(0, 3)),
        decode=data.draw(st.integers(1, 3)),
        replica=data.draw(st.integers(0, 2)),
        appends=data.draw(st.booleans()),
        decode_fallback=data.draw(st.booleans()),
        max_resumptions=data.draw(st.integers(0, 2)),
    )
    effect = it.attempts.start()
    took: Counter[bool] = Counter()  # attempts that a worker had, by whether a stream had begun
    relaying = began = open_prefill = False
    finished = 0
    last: Effect | None = None
    for _ in range(200):
        match effect:
            case Finish():
                finished += 1
                break
            case Send() | Append():
                relaying = False
                if effect is not last:
                    open_prefill = effect.plan.prefill is not None
                    held = 1000 + effect.plan.prefill_tokens
                    assert it.held() == held, "one attempt is held at a time"
            case Relay():
                relaying = began = True
            case Abandon():
                relaying = False
                assert it.held() == 0
                reason = effect.reason
                assert effect.blamed is (reason is None or blames_worker(reason))
                if effect.down:
                    _kill(effect.worker)
                for worker in effect.probe:
                    if data.draw(st.booleans()):
                        _kill(worker)
        last = effect
        event = data.draw(st.sampled_from(_events_after(last, relaying, open_prefill)))
        effect = it.on(event)
        match event:
            case Prefilled() | PrefillFailed():
                open_prefill = False
        if isinstance(effect, Abandon) and effect.reason is not None:
            reason = effect.reason
            refused = reason.refusal is not None and effect.local
            had_it = reason.cause is not Cause.UNCONNECTED and reason.error.status >= 500
            took[began] += had_it and not refused
        if isinstance(effect, Note) and not isinstance(last, Note):
            effect = last if not isinstance(last, Prime) else effect
    assert finished == 1, "it ends"
    assert it.held() == 0, "all holds are given back"
    assert it.attempts.outcome is not None
    assert took[False] <= 2, "a request is never sent to more than two workers that took it"
    assert it.on(Settled()) == it.on(Answered(streams=True)) == it.on(StreamEnded()) == Note()


def _kill(worker: WorkerView) -> None:
    assert isinstance(worker, FakeWorker)
    worker.ready = False


def test_failures_hold_their_place_in_the_table() -> None:
    assert {one for one in FAILURES if blames_worker(one)} == set(BLAMING)
    assert blames_worker(structs.replace(BUSY, cause=Cause.LOST))


@pytest.mark.parametrize(("seen", "queued"), [(True, 300), (False, 0)])
def test_where_no_prefill_is_seen_a_turn_leaves_the_queue_by_its_plan(
    seen: bool, queued: int
) -> None:
    """As behind a gateway: the answer of the decode worker is all that is seen."""
    now_s = 0.0
    backlog = Backlog(lambda: now_s)
    one = world()
    turn = structs.replace(one.turn, times=PrefillTimes(1.0, 0.0, 0.0))
    attempts = Attempts(turn, one.placement, backlog, number=7)
    attempts.sees_prefill = seen
    attempts.start()
    assert backlog.of("p0") == 300
    now_s = 20.0
    assert backlog.of("p0") == queued
    attempts.on(Prefilled(), now_s)
    attempts.on(Answered(streams=False), now_s)
    assert backlog.of("p0") == 0
