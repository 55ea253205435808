"""What a turn's features are, for each kind of turn; also on a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.decision import Features, HomeState, Policy, Reason, Route
from ppd.forecast import Forecast
from ppd.media import Media, MediaKind
from ppd.placement import Placement, PlannedTurn
from ppd.planning import Planner, Query
from ppd.policies import static_policy
from ppd.prefill_times import PrefillTimes
from ppd.prefix import hash_ids, hash_messages
from ppd.score import Weights
from ppd.sessions import SessionIndex, Turn
from ppd.shared_load import SharedLoad

from .cluster import FakeCluster, FakeWorker

PROMPT = list(range(1000))
TURN = Turn(
    session=1,
    number=3,
    home="d",
    prompt_tokens=1000,
    completion_tokens=101,
    prefill_worker="p",
    prefill_tokens=400,
    usual_reply_tokens=100.0,
)


def cluster(*homes: FakeWorker, prefill: tuple[str, ...] = ("q", "p")) -> FakeCluster:
    """Prefill workers, and whichever homes there are."""
    return FakeCluster(*homes, *(FakeWorker(name, Role.PREFILL) for name in prefill))


@dataclass(slots=True)
class World:
    policy: Policy = field(default_factory=lambda: static_policy("full"))
    cluster: FakeCluster = field(default_factory=lambda: cluster(FakeWorker("d")))
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    forecast: Forecast = field(default_factory=Forecast)
    backlog: Backlog = field(default_factory=Backlog)
    known: Turn = TURN
    remote_tokens: int = -1  # of the last plan

    def plan(self, ids: list[int], max_reply_tokens: int | None = None) -> Features | None:
        judged = self.planned(ids, max_reply_tokens)
        self.remote_tokens = judged.remote_tokens
        return judged.features

    def planned(
        self, ids: list[int] | None, max_reply_tokens: int | None = None, body_bytes: int = 0
    ) -> PlannedTurn:
        index = SessionIndex(capacity=10, ttl_s=100.0)
        index.record(hash_ids(b"", PROMPT), self.known, 0.0)
        planner = Planner(
            policy=self.policy,
            placement=Placement(self.cluster, decode_fallback=False),
            index=index,
            arrivals=self.arrivals,
            forecast=self.forecast,
            backlog=self.backlog,
        )
        chain = None if ids is None else hash_ids(b"", ids)
        query = Query("ids", chain, body_bytes, "t", max_reply_tokens, Weights())
        judged = planner.plan(query, 0, 10.0)
        assert planner.plan(query, 0, 10.0) == judged, "to plan twice changes nothing"
        return judged


NEXT = [*PROMPT, *range(100, 201), *range(30)]  # the reply and 30 new tokens


def test_a_later_turn() -> None:
    world = World()
    world.backlog.add("p", 70)
    world.backlog.add("d", 9)
    for at_s in range(10):
        world.arrivals.note(float(at_s))
    seen = world.plan(NEXT)
    assert seen == Features(
        session="000000000001",
        turn=4,
        context_tokens=1100,
        earlier_prompt_tokens=1000,
        new_tokens=30,
        output_tokens=100,
        prefill_cached_tokens=400,
        prefill_queue_tokens=70,
        qps=0.25,
        home=HomeState.READY,
        page_size=16,
        home_running=7,
        home_append_tokens=9,
        home_free_tokens=5009,  # the appends are counted by themselves
    )
    assert seen.uncached_at_home == 1130 - 1088
    assert seen.uncached_at_prefill == world.remote_tokens == 1130 - 400
    assert seen.missed_tokens == 600
    assert seen.min_cached_tokens == 960


def test_what_a_home_was_sent_since_its_report_is_not_free() -> None:
    world = World()
    home = world.cluster.of("d")
    home.headroom.reserve(1, 700)
    home.headroom.reserve(2, 3000, prefilled_here=False)
    seen = world.plan(NEXT)
    assert seen is not None
    assert seen.home_free_tokens == 4300, "what a prefill worker computes comes later"
    home.headroom.answered(1)  # no report has it yet
    assert world.plan(NEXT) == seen
    home.headroom.report(4250)
    seen = world.plan(NEXT)
    assert seen is not None
    assert seen.home_free_tokens == 4250
    home.headroom.report(None)
    seen = world.plan(NEXT)
    assert seen is not None
    assert seen.home_free_tokens is None


def test_each_of_several_routers_counts_the_turns_of_all() -> None:
    """A table's rate is that of the cluster, and each router gets a part of it."""
    arrivals, backlog, load = ArrivalRate(), Backlog(), SharedLoad(0.1, 5.0)
    for at_s in range(10):
        arrivals.note(float(at_s))

    def planner(loads: SharedLoad | None, processes: int) -> Planner:
        return Planner(
            policy=static_policy("pd"),
            placement=Placement(cluster(FakeWorker("d")), decode_fallback=False),
            index=SessionIndex(capacity=1, ttl_s=1.0),
            arrivals=arrivals,
            forecast=Forecast(),
            backlog=backlog,
            loads=loads,
            processes=processes,
        )

    alone, two, shared = planner(None, 1), planner(None, 2), planner(load, 2)
    assert two.qps(10.0) == 2 * alone.qps(10.0) == 0.5
    assert shared.qps(10.0) == alone.qps(10.0), "it has heard of no other"
    for origin in (b"2", b"3"):
        load.read(origin, (), 10.0)
    assert shared.qps(10.0) == 3 * alone.qps(10.0)


def test_a_remote_turn_waits_as_long_as_the_queue_takes() -> None:
    world = World(policy=static_policy("pd"), backlog=Backlog(lambda: 10.0))
    world.policy.prefill_times = PrefillTimes(0.1, 0.0, 0.05)
    planned = world.planned(NEXT)
    assert planned.features is not None
    assert planned.features.prefill_wait_ms == 0
    assert planned.plan is not None
    work = planned.work(planned.plan)
    assert work == pytest.approx(((1130 - 400) * 0.1, (1130 - 1100) * 0.05)), "D lacks 30 tokens"
    world.backlog.add("p", 730, work)
    seen = world.plan(NEXT)
    assert seen is not None
    assert seen.prefill_wait_ms == pytest.approx(work.compute_ms)


def test_several_prompts_do_not_attend_to_each_other() -> None:
    world = World(policy=static_policy("pd"))
    world.policy.prefill_times = PrefillTimes(0.1, 0.01, 0.0)
    planned = world.planned(None, body_bytes=4000)
    assert planned.plan is not None
    assert planned.work(planned.plan).compute_ms == pytest.approx(0.1 * planned.remote_tokens)


def test_what_workers_have_dropped_is_not_counted_on() -> None:
    world = World()
    home, prefill = world.cluster.of("d"), world.cluster.of("p")
    home.dropped, prefill.dropped = {1: 112, 2: 999}, {1: 64}
    seen = world.plan(NEXT)
    assert seen is not None
    assert (seen.context_tokens, seen.evicted_tokens, seen.held_tokens) == (1100, 112, 988)
    assert seen.prefill_cached_tokens == 400 - 64
    home.dropped, prefill.dropped = {1: 9999}, {1: 9999}
    seen = world.plan(NEXT)
    assert seen is not None
    assert (seen.held_tokens, seen.prefill_cached_tokens) == (0, 0)
    assert world.remote_tokens == seen.prompt_tokens
    # The reply is gone, and it would not have been found: nothing is missing.
    world = World(known=structs.replace(TURN, loses_replies=True))
    world.cluster.of("d").dropped = {1: 96}
    seen = world.plan(NEXT)
    assert seen is not None
    assert (seen.context_tokens, seen.evicted_tokens) == (1000, 0)


def test_the_same_input_again() -> None:
    seen = World().plan(PROMPT)
    assert seen is not None
    assert (seen.turn, seen.context_tokens, seen.new_tokens) == (3, 999, 1)


def test_a_reply_is_capped_by_the_request() -> None:
    seen = World().plan(NEXT, max_reply_tokens=8)
    assert seen is not None
    assert seen.output_tokens == 8


def test_another_prefill_worker_has_seen_nothing() -> None:
    world = World(known=structs.replace(TURN, prefill_worker="lost"))
    world.backlog.add("q", 5)
    seen = world.plan(NEXT)
    assert seen is not None
    assert (seen.prefill_cached_tokens, seen.missed_tokens) == (0, 1000)
    assert seen.prefill_queue_tokens == 5


@pytest.mark.parametrize(
    ("homes", "state"),
    [
        ([], HomeState.GONE),
        ([FakeWorker("d", takes_appends=False)], HomeState.UNPATCHED),
        ([FakeWorker("d")], HomeState.READY),
        ([FakeWorker("d", Role.REPLICA, takes_appends=False)], HomeState.REPLICA),
    ],
)
def test_homes(homes: list[FakeWorker], state: HomeState) -> None:
    seen = World(cluster=cluster(*homes)).plan(NEXT)
    assert seen is not None
    assert seen.home is state


def test_a_replica_needs_no_plugin() -> None:
    alone = cluster(FakeWorker("d", Role.REPLICA, takes_appends=False), prefill=())
    seen = World(policy=static_policy("replica"), cluster=alone).plan(NEXT)
    assert seen is not None
    assert seen.home is HomeState.READY


def test_an_unknown_prompt_is_counted_by_its_bytes() -> None:
    world = World()
    chain = hash_ids(b"", [7] * 500)
    world.forecast.learn_prompt("ids", chain.total_bytes, 500)
    assert world.plan([9] * 2000) is None
    assert world.remote_tokens == 2000


def test_several_prompts_have_no_home() -> None:
    world = World()
    planner = Planner(
        policy=world.policy,
        placement=Placement(world.cluster, decode_fallback=False),
        index=SessionIndex(capacity=1, ttl_s=1.0),
        arrivals=world.arrivals,
        forecast=world.forecast,
        backlog=world.backlog,
    )
    judged = planner.plan(Query("ids", None, 4000, "t", None, Weights()), 0, 0.0)
    assert (judged.decision.route, judged.decision.reason) == (Route.REMOTE, Reason.BATCH)
    assert judged.remote_tokens == 1000


def test_a_reply_that_does_not_come_back_is_no_context() -> None:
    reasoned = structs.replace(TURN, completion_tokens=5000)  # of which the client sends 101 again
    seen = World(known=reasoned).plan(NEXT)
    assert seen is not None
    assert (seen.context_tokens, seen.new_tokens) == (1000, 131)
    other = structs.replace(TURN, loses_replies=True)  # or all of it, cut into other tokens
    seen = World(known=other).plan(NEXT)
    assert seen is not None
    assert (seen.context_tokens, seen.new_tokens) == (1000, 131)


IMAGE = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
UNSIZED = Media(MediaKind.UNSIZED_IMAGE, 1.0, len("https://a.example/b.png"))


@pytest.mark.parametrize(
    ("opening", "prompt_tokens", "last", "new_tokens"),
    [
        # 400 bytes of text are 100 tokens, and an image of 1000 tokens does not change that.
        (["a" * 3996], 1000, ["b" * 396], 100),
        (["a" * 3996, IMAGE], 2000, ["b" * 396], 100),
        (["a" * 3996], 1000, ["b" * 396, IMAGE], 100 + 1024),
        (["a" * 3996, IMAGE], 2000, ["b" * 396, IMAGE, IMAGE], 100 + 2048),
        ([IMAGE], 2000, ["b" * 396], 100),
    ],
)
def test_images_are_no_text(
    opening: list[object], prompt_tokens: int, last: list[object], new_tokens: int
) -> None:
    def user(contents: list[object]) -> dict[str, object]:
        parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in contents]
        return {"role": "user", "content": parts}

    history = [user(opening)]
    known = structs.replace(TURN, prompt_tokens=prompt_tokens, completion_tokens=1)
    index = SessionIndex(capacity=10, ttl_s=100.0)
    index.record(hash_messages(b"", history), known, 0.0)
    planner = Planner(
        policy=static_policy("full"),
        placement=Placement(cluster(FakeWorker("d")), decode_fallback=False),
        index=index,
        arrivals=ArrivalRate(),
        forecast=Forecast(),
        backlog=Backlog(),
    )
    chain = hash_messages(b"", [*history, {"role": "assistant", "content": ""}, user(last)])
    query = Query("chat", chain, 0, "t", 1, Weights(), media=chain.media)
    seen = planner.plan(query, 0, 10.0).features
    assert seen is not None
    assert seen.has_media == bool(chain.media)
    assert seen.context_tokens == prompt_tokens
    assert seen.new_tokens == pytest.approx(new_tokens, abs=5)
    first = Query("chat", hash_messages(b"", [user(["c", IMAGE])]), 9, "t", 1, Weights())
    assert planner.kv_tokens(structs.replace(first, media=(UNSIZED,))) == 1024 + 1 + 1
    assert planner.kv_tokens(Query("chat", None, 400, "t", 7, Weights(), None, 2, (UNSIZED,))) == (
        100 + 1024 + 14
    )
