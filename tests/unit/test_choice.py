"""Which workers new conversations get: by queue, KV in use and shared prefixes, without herding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ppd.backlog import Backlog
from ppd.choice import MIN_LEFT, MIN_SLACK, SLACK, ByLoad, choose_decode, choose_prefill
from ppd.contract import Role
from ppd.decision import Decision, Reason, Route
from ppd.placement import MAX_LOAD, Placement, PlannedTurn
from ppd.prefix import hash_ids, hash_messages, hash_text
from ppd.shared import MIN_BYTES, SharedPrefixes, shareable

from .cluster import FakeCluster, FakeWorker

SHARED = 8000  # tokens
FIRST = Decision(Route.REMOTE, Reason.FIRST_TURN)
TURN = PlannedTurn(None, None, FIRST, 1000, 1200, b"a conversation..", True, None)


def prefill_workers(count: int) -> list[FakeWorker]:
    return [FakeWorker(f"p{i}", Role.PREFILL) for i in range(count)]


def decode_workers(*left: int) -> list[FakeWorker]:
    made = [FakeWorker(f"d{i}") for i in range(len(left))]
    for worker, tokens in zip(made, left, strict=True):
        worker.headroom.report(tokens)
    return made


@st.composite
def prefill_cases(
    draw: st.DrawFn,
) -> tuple[list[FakeWorker], Backlog, dict[str, int], int, int]:
    ready = prefill_workers(draw(st.integers(1, 6)))
    backlog, held = Backlog(), {}
    tokens = draw(st.integers(1, 20_000))
    for worker in ready:
        backlog.add(worker.identity, draw(st.integers(0, 50_000)))
        if draw(st.booleans()):
            held[worker.identity] = draw(st.integers(1, 20_000))
    return ready, backlog, held, tokens, draw(st.integers(0, 2**64 - 1))


@given(prefill_cases())
def test_no_prefill_worker_is_taken_that_makes_the_request_wait_longer(
    case: tuple[list[FakeWorker], Backlog, dict[str, int], int, int],
) -> None:
    ready, backlog, held, tokens, seed = case

    def cost(worker: FakeWorker) -> int:
        mine = held.get(worker.identity, 0)
        return backlog.of(worker.identity) + max(1, tokens - mine)

    least = min(map(cost, ready))
    chosen = choose_prefill(ready, [], tokens, held, backlog.of, seed)
    assert chosen is not None
    assert cost(chosen) <= least + max(MIN_SLACK, SLACK * least)
    plain = choose_prefill(ready, [], tokens, held, backlog.of, None)
    assert plain is not None
    assert cost(plain) == least
    other = choose_prefill(ready, [chosen], tokens, held, backlog.of, seed)
    assert (other is chosen) is (len(ready) == 1)


@given(
    workers=st.integers(2, 6),
    tails=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
    shared=st.integers(0, 10_000),
)
def test_turns_at_once_with_one_prefix_do_not_herd(
    workers: int, tails: list[int], shared: int
) -> None:
    """Planned one after the other while none is served, as in one burst."""
    cluster = FakeCluster(*prefill_workers(workers), *decode_workers(*[100_000] * 2))
    backlog = Backlog()
    placement = Placement(cluster, decode_fallback=False, chooser=ByLoad(cluster, backlog))
    prefixes = SharedPrefixes(min_bytes=1)
    waits = []
    for i, tail in enumerate(tails):
        messages = [{"role": "system", "content": "s" * 4 * max(1, shared)}]
        chain = hash_messages(b"", [*messages, {"role": "user", "content": f"{i} asks"}])
        found = prefixes.find(chain, 0.0)
        held = {worker: min(size // 4, shared) for worker, size in found.items()}
        root = random.Random(i).randbytes(16)
        turn = structs.replace(TURN, remote_tokens=shared + tail, held=held, root=root)
        plan = placement.plan(turn, FIRST)
        assert plan.prefill is not None
        prefixes.record(chain, [plan.prefill.identity], 0.0)
        backlog.add(plan.prefill.identity, plan.prefill_tokens)
        waits.append(plan.prefill_tokens)
    queues = [backlog.of(f"p{i}") for i in range(workers)]
    # A worker is behind another one by no more than the prefix that it would have to compute,
    # one request, and what counts as equal.
    slack = max(MIN_SLACK, SLACK * (max(queues) + shared + max(tails)))
    assert max(queues) - min(queues) <= shared + max(tails) + slack
    # The prefix is computed by as many workers as there are, at most once by each.
    assert sum(waits) <= sum(tails) + workers * shared


def test_a_prefix_draws_requests_until_its_worker_has_a_queue_as_long() -> None:
    ready, backlog = prefill_workers(4), Backlog()
    held = {"p2": SHARED}
    for seed in range(50):
        chosen = choose_prefill(ready, [], SHARED + 200, held, backlog.of, seed)
        assert chosen is ready[2]
    backlog.add("p2", SHARED + 2000)
    for seed in range(50):
        chosen = choose_prefill(ready, [], SHARED + 200, held, backlog.of, seed)
        assert chosen is not ready[2]


@st.composite
def decode_cases(draw: st.DrawFn) -> tuple[list[FakeWorker], dict[str, int], int]:
    left = st.integers(-50_000, 100_000)  # more may be reserved than there is
    ready = decode_workers(*draw(st.lists(left, min_size=1, max_size=6)))
    held = {}
    for worker in ready:
        worker.in_flight = draw(st.integers(0, 20))
        worker.room = draw(st.booleans())
        if draw(st.booleans()):
            worker.headroom.report(None)
        if draw(st.booleans()):
            held[worker.identity] = draw(st.integers(1, 20_000))
    return ready, held, draw(st.integers(0, 2**64 - 1))


@given(decode_cases())
def test_no_full_or_busy_decode_worker_is_taken_for_a_prefix(
    case: tuple[list[FakeWorker], dict[str, int], int],
) -> None:
    ready, held, seed = case
    for given_seed in (seed, None):
        chosen = choose_decode(ready, [], 500, held, given_seed)
        assert chosen is not None
        fit = [w for w in ready if w.room] or ready
        assert chosen in fit
        assert chosen.in_flight < MAX_LOAD * (1 + sum(w.in_flight for w in fit)) / len(fit)
        calm = [
            w
            for w in fit
            if w.in_flight < MAX_LOAD * (1 + sum(one.in_flight for one in fit)) / len(fit)
        ]
        left = [w.headroom.left_tokens for w in calm if w.headroom.left_tokens is not None]
        mine = chosen.headroom.left_tokens
        assert mine is None or mine >= min(max(left), MIN_LEFT * max(left))


def test_equal_workers_are_chosen_by_the_conversation_alone() -> None:
    """So routers that share no state agree, though their loads differ a little."""
    source = random.Random(0)
    agreed = 0
    for _ in range(500):
        seed = source.getrandbits(64)
        picks = []
        for _router in range(2):
            ready = decode_workers(*(source.randint(90_000, 100_000) for _ in range(4)))
            for worker in ready:
                worker.in_flight = source.randint(9, 10)
            chosen = choose_decode(ready, [], 500, {}, seed)
            assert chosen is not None
            picks.append(chosen.identity)
        agreed += picks[0] == picks[1]
    assert agreed == 500
    ready = decode_workers(*[100_000] * 4)
    counts = [0] * 4
    for _ in range(2000):
        chosen = choose_decode(ready, [], 500, {}, source.getrandbits(64))
        assert chosen is not None
        counts[ready.index(chosen)] += 1
    assert min(counts) > 400, "conversations are spread"


def test_a_home_is_taken_though_another_worker_is_emptier() -> None:
    cluster = FakeCluster(*prefill_workers(2), *decode_workers(10_000, 100_000))
    placement = Placement(
        cluster, decode_fallback=False, chooser=ByLoad(cluster, backlog := Backlog())
    )
    backlog.add("p0", 10_000)
    plan = placement.plan(TURN, FIRST)
    assert plan.prefill is not None
    assert (plan.prefill.identity, plan.decode.identity) == ("p1", "d1")
    priced = structs.replace(TURN, prefill=cluster.of("p0"))
    plan = placement.plan(priced, FIRST)
    assert plan.prefill is cluster.of("p0"), "it was priced, and is what is sent to"


def test_a_plan_reserves_what_its_worker_has_to_compute() -> None:
    cluster = FakeCluster(*prefill_workers(1), *decode_workers(10_000))
    placement = Placement(cluster, decode_fallback=False, chooser=ByLoad(cluster, Backlog()))
    for held, tokens in ((0, 1000), (900, 100), (5000, 1)):
        turn = structs.replace(TURN, held={"p0": held})
        assert placement.plan(turn, FIRST).prefill_tokens == tokens


# -- what is held -----------------------------------------------------------------------------


def chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def test_a_shared_system_prompt_is_found_under_its_own_tenant_only() -> None:
    prefixes, system = SharedPrefixes(), "rules " * 1000
    first = hash_messages(b"tenant", chat(system, "one"))
    assert prefixes.find(first, 0.0) == {}
    prefixes.record(first, ["p0", "d0"], 0.0)
    second = hash_messages(b"tenant", chat(system, "two"))
    size = len("system") + len(system)
    assert prefixes.find(second, 1.0) == {"p0": size, "d0": size}
    assert prefixes.find(hash_messages(b"other", chat(system, "two")), 1.0) == {}
    assert prefixes.find(hash_messages(b"tenant", chat(system + "!", "two")), 1.0) == {}


@pytest.mark.parametrize("shared_bytes", [0, 1000, 5000, 40_000, 1_000_000])
def test_of_prompts_most_of_the_shared_part_is_found(shared_bytes: int) -> None:
    prefixes = SharedPrefixes()
    one, two = (hash_text(b"", "s" * shared_bytes + end * 3000) for end in "ab")
    prefixes.record(one, ["p0"], 0.0)
    found = prefixes.find(two, 0.0).get("p0", 0)
    assert found <= shared_bytes
    if shared_bytes >= 2 * MIN_BYTES:
        assert found >= 0.8 * shared_bytes


def test_the_longest_prefix_of_each_worker_counts() -> None:
    prefixes = SharedPrefixes(min_bytes=1)
    few_shot = [*chat("rules", "q1"), {"role": "assistant", "content": "a1"}]
    long = [*few_shot, {"role": "user", "content": "q2"}, {"role": "user", "content": "q3"}]
    prefixes.record(hash_messages(b"", chat("rules", "other")), ["p0"], 0.0)
    prefixes.record(hash_messages(b"", long), ["p1"], 0.0)
    asked = hash_messages(b"", [*few_shot, {"role": "user", "content": "new"}])
    found = prefixes.find(asked, 0.0)
    assert found["p1"] > found["p0"] > 0


def test_records_are_bounded_and_end() -> None:
    prefixes = SharedPrefixes(capacity=50, ttl_s=10.0, min_bytes=1)
    for i in range(200):
        prefixes.record(hash_messages(b"", chat(f"rules {i}", "q")), ["p0"], float(i))
        assert len(prefixes) <= 50
    kept = hash_messages(b"", chat("rules 199", "another"))
    assert set(prefixes.find(kept, 205.0)) == {"p0"}
    assert prefixes.find(kept, 210.0) == {}
    prefixes.record(kept, ["p1"], 210.0)
    assert set(prefixes.find(kept, 210.0)) == {"p1"}


def test_a_long_history_has_few_boundaries() -> None:
    history = [{"role": "user", "content": "x" * 5000} for _ in range(500)]
    assert len(list(shareable(hash_messages(b"", history), MIN_BYTES))) == 8
    ids = hash_ids(b"", range(1_000_000))
    boundaries = list(shareable(ids, MIN_BYTES))
    assert len(boundaries) < 80
    assert all(size < ids.total_bytes for _, size in boundaries)
    assert list(shareable(hash_text(b"", "short"), MIN_BYTES)) == []
