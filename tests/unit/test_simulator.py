"""The simulated cluster: its books, its clock, and the cost model that it must agree with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.simulation.cache import KvCache, SharedPrefix
from eval.simulation.cost_model import H100, LLAMA_8B, VLLM_H100, CostModel, Extend, paper_model
from eval.simulation.link import Link
from eval.simulation.rows import Result
from eval.simulation.simulator import Simulation
from eval.simulation.traffic import (
    Clients,
    Conversation,
    TurnTokens,
    Workload,
    lengthened,
    load,
    poisson,
)
from eval.simulation.workers import Chunking, PlacementRule, Shape
from ppd.decision import Reason, Route
from ppd.errors import ConfigError
from ppd.policies import static_policy

COSTS = paper_model()
TALK = (TurnTokens(1000, 200), TurnTokens(50, 64), TurnTokens(300, 32))


def held(
    shape: str,
    conversations: list[Conversation],
    *,
    policy: str = "full",
    costs: CostModel = COSTS,
    clients: Clients | None = None,
    seed: int = 0,
    delta: bool = False,
    paced: bool = False,
) -> tuple[Simulation, Result]:
    simulation = Simulation(
        costs,
        Shape.parse(shape),
        static_policy(policy),
        clients or Clients(),
        seed,
        delta=delta,
        chunking=Chunking(paced_tokens=2048 if paced else None),
    )
    return simulation, simulation.run(conversations)


def busy(count: int, qps: float, seed: int = 0, think_s: float = 0.0) -> list[Conversation]:
    workload = Workload("w", TALK, (qps,), think_s)
    # As many as asked for: none may be left out for coming late.
    arrivals = poisson(workload, qps, 100 * count / qps, random.Random(seed))
    return [one for one, _ in zip(arrivals, range(count), strict=False)]


SHAPES = ("1P_3D", "2P_2pD", "1P_2D_1pD", "4R", "1R_1P_1D_1pD", "1Px2_1pDx3", "1Rx4")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("paced", [False, True])
def test_every_turn_ends_once_and_nothing_is_left(shape: str, paced: bool) -> None:
    conversations = busy(200, 20.0)
    policy = "replica" if shape in ("4R", "1Rx4") else "full"
    simulation, result = held(shape, conversations, policy=policy, paced=paced)
    ended = sorted((row.session, row.turn) for row in result.rows)
    assert ended == [(one.session, turn) for one in conversations for turn in (1, 2, 3)]
    for name, worker in simulation.cluster.workers.items():
        engine = worker.engine
        assert engine.sequences == engine.waiting == engine.cache.active_tokens == 0
        assert (worker.in_flight, worker.headroom.reserved_tokens) == (0, 0)
        assert simulation.backlog.of(name) == 0


@pytest.mark.parametrize("shape", ["1P_1pD", "1P_1D", "1R"])
def test_with_little_memory_everything_still_ends(shape: str) -> None:
    """Requests wait for KV, prefixes are evicted, and local turns that lost theirs go remote."""
    needed = LLAMA_8B.weight_bytes + VLLM_H100.activation_bytes + 4000 * 131_072
    costs = CostModel(LLAMA_8B, replace(H100, memory_bytes=needed / 0.85), VLLM_H100)
    assert 3990 <= costs.kv_capacity_tokens <= 4000
    policy = "replica" if shape == "1R" else "full"
    conversations = busy(60, 30.0, think_s=1.0)
    simulation, result = held(shape, conversations, costs=costs, policy=policy)
    assert len(result.rows) == 180
    assert result.evicted_tokens > 0
    refused = [row for row in result.rows if row.reason is Reason.REFUSED_BY_WORKER]
    assert bool(refused) is (shape == "1P_1pD")
    assert all(row.route is Route.REMOTE for row in refused)
    workers = simulation.cluster.workers.values()
    assert all(worker.engine.cache.active_tokens == 0 for worker in workers)


def test_alone_a_turn_takes_what_the_cost_model_gives() -> None:
    alone = [Conversation(0, 1.0, TALK, (0.0, 0.0))]
    _, local = held("1P_1pD", alone)
    _, remote = held("1P_1D", alone)
    _, replica = held("1R", alone, policy="replica")
    first_ms = COSTS.remote_ttft_ms(1000, 0, 1000)
    # The last generated token was never fed back: 1,199 tokens of KV after turn 1.
    local_ms, remote_ms = COSTS.local_ttft_ms(51, 1199), COSTS.remote_ttft_ms(250, 1000, 1250)
    assert [row.ttft_ms for row in local.rows[:2]] == pytest.approx([first_ms, local_ms])
    assert [row.ttft_ms for row in remote.rows[:2]] == pytest.approx([first_ms, remote_ms])
    assert [row.ttft_ms for row in replica.rows[:2]] == pytest.approx(
        [COSTS.local_ttft_ms(1000, 0), local_ms]
    )
    assert local.rows[1].tpot_ms == pytest.approx(COSTS.decode_ms(63, 1, 1251) / 63)
    assert [row.route for row in local.rows] == [Route.REMOTE, Route.LOCAL, Route.LOCAL]
    assert {row.route for row in replica.rows} == {Route.REPLICA}


def test_what_is_moved() -> None:
    alone = [Conversation(0, 1.0, TALK, (0.0, 0.0))]
    assert [row.moved_tokens for row in held("1P_1D", alone)[1].rows] == [1000, 1250, 1614]
    assert [row.moved_tokens for row in held("1P_1pD", alone)[1].rows] == [1000, 0, 0]
    # What the decode worker lacks: the last token of the reply, and what is new.
    assert [row.moved_tokens for row in held("1P_1D", alone, delta=True)[1].rows] == [1000, 51, 301]


def test_replies_that_no_cache_holds_are_computed_again() -> None:
    alone = [Conversation(0, 1.0, TALK, (0.0, 0.0))]
    _, result = held("1P_1pD", alone, clients=Clients(replies_lost=True))
    assert [row.cached_tokens for row in result.rows] == [0, 1000, 1250]
    assert result.rows[1].ttft_ms == pytest.approx(COSTS.local_ttft_ms(250, 1000))


def test_the_seed_determines_the_run() -> None:
    rows = [held("2P_2pD", busy(100, 10.0), seed=seed)[1].rows for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.parametrize("shape", ["1P_1pD", "1P_1D"])
def test_more_load_is_not_faster(shape: str) -> None:
    means = []
    for qps in (0.2, 2.0, 6.0, 12.0):
        ttfts = [
            row.ttft_ms
            for seed in range(3)
            for row in held(shape, busy(150, qps, seed), seed=seed)[1].rows
        ]
        means.append(sum(ttfts) / len(ttfts))
    assert means == sorted(means)


def test_clients_wait_for_a_connection_with_their_clocks_running() -> None:
    at_once = [Conversation(i, 0.0, TALK[:1], ()) for i in range(3)]
    _, result = held("1P_1D", at_once, clients=Clients(connections=1))
    first, second, third = sorted(row.ttft_ms for row in result.rows)
    assert second == pytest.approx(first + result.rows[0].e2e_ms)
    assert third == pytest.approx(second + result.rows[0].e2e_ms)
    timeout_s = result.rows[0].e2e_ms * 1.5 / 1e3
    _, result = held("1P_1D", at_once, clients=Clients(connections=1, timeout_s=timeout_s))
    assert sum(row.failed for row in result.rows) == 2


def test_pacing_spares_decodes() -> None:
    """A decode worker that appends in chunks chosen by ``ppd.pacing`` keeps its longest TPOT
    lower than one that takes whatever fits a step."""
    long = [Conversation(0, 0.0, (TurnTokens(200, 4000),), ())]
    paste = (TurnTokens(200, 2), TurnTokens(8000, 2))
    pasted = [Conversation(1 + i, 1.0 + i, paste, (0.0,)) for i in range(20)]
    rows = {
        paced: {row.session: row for row in held("1P_1pD", long + pasted, paced=paced)[1].rows}
        for paced in (False, True)
    }
    assert all(len(of) == 21 for of in rows.values())
    # The same work is done either way; in more steps it takes somewhat longer.
    assert rows[True][0].e2e_ms == pytest.approx(rows[False][0].e2e_ms, rel=0.1)
    assert rows[True][20].ttft_ms > rows[False][20].ttft_ms


@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 400_000))
def test_decode_steps_in_closed_form(steps: int, sequences: int, context_tokens: int) -> None:
    one_by_one = sum(
        COSTS.step_ms(sequences, context_tokens + sequences * i, []) for i in range(steps)
    )
    total = COSTS.decode_ms(steps, sequences, context_tokens)
    assert total == pytest.approx(one_by_one)
    assert COSTS.decode_steps(total, sequences, context_tokens) == steps
    assert COSTS.decode_steps(total + 0.01, sequences, context_tokens) == steps + 1


def test_what_a_step_costs() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131_072
    # Few new tokens cost what reading the weights costs; many, what computing them does.
    assert COSTS.step_ms(0, 0, [Extend(1, 0)]) == pytest.approx(
        COSTS.step_ms(0, 0, [Extend(64, 0)]), abs=1e-9
    )
    whole = COSTS.step_ms(0, 0, [Extend(8192, 0)])
    assert whole > 1.9 * COSTS.step_ms(0, 0, [Extend(4096, 0)])
    # Two chunks do the same products as the whole: O(m(n+m)).
    chunks = [Extend(4096, 0), Extend(4096, 4096)]
    assert sum(chunk.pairs for chunk in chunks) == Extend(8192, 0).pairs


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans()), max_size=60))
def test_the_cache_never_overflows(requests: list[tuple[int, int, bool]]) -> None:
    cache = KvCache(100)
    running: list[tuple[int, int]] = []
    for session, tokens, gives in requests:
        if gives and running:
            cache.give(*(last := running.pop()), last[1] // 2)
        elif cache.can_take(tokens):
            assert 0 <= cache.take(session, tokens) <= tokens
            running.append((session, tokens))
        held_tokens = sum(cache.cached_tokens(session) for session in range(6))
        assert cache.active_tokens == sum(tokens for _, tokens in running)
        assert cache.active_tokens + held_tokens <= 100
        assert min(held_tokens, cache.free_tokens) >= 0


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = KvCache(100)
    for session in (1, 2):
        cache.take(session, 40)
        cache.give(session, 40, 40)
    cache.take(3, 30)
    assert [cache.cached_tokens(session) for session in (1, 2)] == [30, 40]
    assert cache.evicted_tokens == 10


def decoding_times(shape: str, append_tokens: int) -> list[float]:
    """TPOTs of one long reply on each worker of a shape, with an append on the last one."""
    long = (TurnTokens(1000, 400),)
    conversations = [Conversation(i, 0.0, long, ()) for i in range(2)]
    if append_tokens:
        turns = (TurnTokens(1000, 2), TurnTokens(append_tokens, 2))
        conversations.append(Conversation(2, 0.0, turns, (1.0,)))
    placement = PlacementRule.LEAST_LOADED
    simulation = Simulation(
        COSTS, Shape.parse(shape), static_policy("full"), Clients(), 0, placement=placement
    )
    rows = simulation.run(conversations).rows
    assert [row.route for row in rows if row.turn == 2] == [Route.LOCAL] * bool(append_tokens)
    return [row.tpot_ms for row in sorted(rows, key=lambda row: row.session) if row.session < 2]


def test_what_was_lost_is_what_no_request_would_find() -> None:
    cache = KvCache(100)
    shared = SharedPrefix(1, 20)
    for session in (1, 2):
        cache.take(session, 40, shared)
        cache.give(session, 40, 40, shared)
    assert [cache.lost_tokens(session) for session in (1, 2, 3)] == [0, 0, 0]
    cache.take(3, 45)  # the first session's own 40 go, and 5 of the shared prefix
    assert cache.lost_tokens(1) == 40 - 15, "the rest of the shared prefix is found"
    assert cache.lost_tokens(2) == 0
    assert cache.lost_tokens(3) == 0, "it is under way"
    cache.cut(2, 30)
    assert cache.lost_tokens(2) == 0, "no prompt has the rest"
    cache.take(4, 30)  # the rest of the shared prefix goes, and 5 of the second session
    assert cache.lost_tokens(2) == 5
    cache.give(4, 30, 0)
    cache.take(2, 30)
    assert cache.lost_tokens(2) == 0


def test_a_host_loses_nothing_that_it_can_restore() -> None:
    cache = KvCache(50, host_tokens=40)
    cache.take(1, 40)
    cache.give(1, 40, 40)
    cache.take(2, 50)
    assert cache.cached_tokens(1) == 0
    assert cache.lost_tokens(1) == 0


def test_an_append_delays_the_decodes_of_all_ranks() -> None:
    alone, apart, together = (
        decoding_times(shape, append)
        for shape, append in (("3P_2pDx1", 0), ("3P_2pD", 4000), ("3P_1pDx2", 4000))
    )
    append_ms = COSTS.step_ms(0, 0, [Extend(4000, 1001)])
    with_append, beside = max(apart), min(apart)
    assert beside == pytest.approx(min(alone), rel=0.01)
    assert with_append > beside + 0.9 * append_ms / 399
    assert together == pytest.approx([with_append] * 2, rel=0.05)


def test_ranks_with_nothing_in_common_are_as_separate_workers() -> None:
    """Conversations far from each other: no step has two of them."""
    apart = [Conversation(i, 100.0 * i, TALK, (1.0, 1.0)) for i in range(5)]
    (_, ranks), (_, workers) = (held(shape, apart) for shape in ("1P_1pDx4", "1P_4pD"))
    assert ranks == workers


def test_transfers_queue() -> None:
    link = Link(0.01)
    assert [link.send(100, 0.0), link.send(100, 0.5), link.send(100, 10.0)] == [1.0, 2.0, 11.0]
    assert link.moved_tokens == 300


def test_transfers_to_one_receiver_queue() -> None:
    one, other, receiver = Link(0.01), Link(0.01), Link(0.01)
    assert [one.send(100, 0.0, receiver), other.send(100, 0.0, receiver)] == [1.0, 2.0]
    assert [one.send(100, 0.0), other.send(100, 0.0, Link(0.01))] == [2.0, 3.0]


def test_shapes() -> None:
    assert Shape.parse("1R_2P_3D_4pD") == Shape(prefill=2, decode=3, appending=4, replica=1)
    ranked = Shape.parse("2P_1D_1pDx8")
    assert ranked == Shape(prefill=2, decode=1, appending=1, ranks=(1, 1, 8, 1))
    assert ranked.workers == 11
    for wrong in ("", "4X", "1P", "2D", "1P_1P_1D", "0R", "P_D", "1P_1Dx0", "1Px_1D"):
        with pytest.raises(ConfigError, match="shape"):
            Shape.parse(wrong)


def test_workload_files(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('[{"name": "a", "turns": [{"new": 100, "out": 5}], "qps": [1], "think_s": 0}]')
    (workload,) = load(path)
    assert lengthened(workload, 1.22).turns == (TurnTokens(122, 5),)
    for wrong in ("[", '[{"name": "a", "turns": [{"new": 0, "out": 5}], "qps": [1]}]', "{}"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"w\.json"):
            load(path)
    with pytest.raises(ConfigError):
        load(tmp_path / "none.json")
