"""Simulated workers that die: what becomes of their requests, by the rules of ``ppd.attempts``."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.simulation.cost_model import Extend, paper_model
from eval.simulation.outages import Outage
from eval.simulation.rows import Result
from eval.simulation.simulator import Simulation
from eval.simulation.traffic import Clients, Conversation, TurnTokens, Workload, poisson
from eval.simulation.workers import PlacementRule, Shape
from ppd.decision import Reason, Route
from ppd.errors import ConfigError
from ppd.outcome import Outcome
from ppd.policies import static_policy

COSTS = paper_model()
CHAT = (TurnTokens(1000, 200), TurnTokens(50, 64), TurnTokens(300, 32))


def simulated(
    shape: str,
    conversations: list[Conversation],
    *outages: str,
    policy: str = "full",
    max_resumptions: int = 0,
    placement: PlacementRule = PlacementRule.LEAST_LOADED,
    seed: int = 0,
) -> tuple[Simulation, Result]:
    simulation = Simulation(
        COSTS,
        Shape.parse(shape),
        static_policy(policy),
        Clients(),
        seed,
        delta=True,
        placement=placement,
        outages=[Outage.parse(text) for text in outages],
        max_resumptions=max_resumptions,
    )
    return simulation, simulation.run(conversations)


def one(think_s: float = 0.0, turns: tuple[TurnTokens, ...] = CHAT) -> list[Conversation]:
    """One conversation, from second 1."""
    return [Conversation(0, 1.0, turns, (think_s,) * (len(turns) - 1))]


OUTAGES = st.lists(
    st.tuples(st.sampled_from(("p0", "p1", "a0", "a1")), st.floats(0, 8), st.floats(0.05, 4)),
    max_size=6,
    unique_by=lambda outage: outage[0],
)


@settings(max_examples=60, deadline=None)
@given(
    outages=OUTAGES,
    max_resumptions=st.integers(0, 2),
    placement=st.sampled_from([*PlacementRule]),
    shape=st.sampled_from(("2P_2pD", "2Px2_2pDx3")),
    seed=st.integers(0, 5),
)
def test_whatever_dies_each_turn_ends_once_and_nothing_is_held(
    outages: list[tuple[str, float, float]],
    max_resumptions: int,
    placement: PlacementRule,
    shape: str,
    seed: int,
) -> None:
    workload = Workload("w", CHAT, (8.0,), 0.5)
    conversations = list(poisson(workload, 8.0, 6.0, random.Random(seed)))
    simulation, result = simulated(
        shape,
        conversations,
        *(f"{worker}@{at_s:.3f}+{for_s:.3f}" for worker, at_s, for_s in outages),
        max_resumptions=max_resumptions,
        placement=placement,
        seed=seed,
    )
    ended = sorted((row.session, row.turn) for row in result.rows)
    assert len(set(ended)) == len(ended)
    for conversation in conversations:
        rows = [row for row in result.rows if row.session == conversation.session]
        assert all(row.outcome is Outcome.OK for row in rows[:-1])
        assert rows[-1].outcome is not Outcome.OK or len(rows) == len(CHAT)
        assert {row.outcome for row in rows} <= {
            Outcome.OK,
            Outcome.TRUNCATED,
            Outcome.WORKER_ERROR,
        }
    for name, worker in simulation.cluster.workers.items():
        assert (worker.in_flight, worker.headroom.reserved_tokens) == (0, 0)
        assert simulation.backlog.of(name) == simulation.backlog.of(worker.identity) == 0
        assert worker.alive
        # An abandoned prefill runs to its end; nothing else is left.
        assert worker.engine.sequences == worker.engine.cache.active_tokens == 0


def test_an_outage_beside_all_requests_changes_nothing() -> None:
    _, calm = simulated("1P_2pD", one())
    _, idle = simulated("1P_2pD", one(), "a1@1.1+3", "p0@100+3")
    assert idle == calm


def test_a_turn_whose_home_died_goes_remote() -> None:
    _, result = simulated("1P_2pD", one(think_s=10.0), "a0@5+1")
    assert [(row.route, row.reason) for row in result.rows[1:]] == [
        (Route.REMOTE, Reason.HOME_GONE),
        (Route.LOCAL, Reason.POLICY_FULL),
    ]
    assert result.rows[1].cached_tokens == 1000  # on the prefill worker


def test_the_router_finds_a_dead_home_by_the_turn_itself() -> None:
    """The turn comes before the next probe: its connection is refused."""
    (calm,) = (row for row in simulated("1P_2pD", one(3.0))[1].rows if row.turn == 2)
    _, result = simulated("1P_2pD", one(3.0), f"a0@{calm.at_s - 0.01:.3f}+60")
    assert (result.rows[1].route, result.rows[1].reason) == (Route.REMOTE, Reason.HOME_GONE)
    assert all(row.outcome is Outcome.OK for row in result.rows)


def test_a_home_that_came_back_empty_refuses_the_local_turn() -> None:
    """It died and was back between two probes: the cluster has not seen that."""
    (calm,) = (row for row in simulated("1P_2pD", one(3.0))[1].rows if row.turn == 2)
    assert calm.at_s % 2 > 0.5, "the turn comes well after a probe"
    _, result = simulated("1P_2pD", one(3.0), f"a0@{calm.at_s - 0.2:.3f}+0.1")
    assert (result.rows[1].route, result.rows[1].reason) == (
        Route.REMOTE,
        Reason.REFUSED_BY_WORKER,
    )


@pytest.mark.parametrize(("max_resumptions", "outcome"), [(0, "truncated"), (1, "ok")])
def test_a_stream_whose_worker_dies(max_resumptions: int, outcome: str) -> None:
    long = (TurnTokens(1000, 400),)
    calm = simulated("1P_2pD", one(turns=long))[1].rows[0]
    middle_s = calm.at_s + (calm.ttft_ms + calm.e2e_ms) / 2e3
    _, result = simulated(
        "1P_2pD", one(turns=long), f"a0@{middle_s:.3f}+9", max_resumptions=max_resumptions
    )
    (row,) = result.rows
    assert row.outcome == outcome
    assert row.ttft_ms == calm.ttft_ms
    if max_resumptions:
        assert row.reason is Reason.RESUMED
        # About half of the reply was generated, and its KV goes to the other worker.
        assert 1000 + 150 < row.moved_tokens - 1000 < 1000 + 250
        assert calm.e2e_ms < row.e2e_ms < calm.e2e_ms + 2 * calm.ttft_ms + 200


@pytest.mark.parametrize("when", ["prefilling", "transferring"])
def test_a_prefill_worker_that_dies_is_replaced(when: str) -> None:
    calm = simulated("2P_1pD", one())[1].rows[0]
    prefill_ms = COSTS.step_ms(0, 0, [Extend(1000, 0)])
    lost_ms = {
        "prefilling": prefill_ms / 2,
        "transferring": prefill_ms + 1000 * COSTS.transfer_ms / 2,
    }[when]
    at_s = calm.at_s + (COSTS.serving.request_ms + lost_ms) / 1e3
    results = [
        simulated("2P_1pD", one(), f"{name}@{at_s:.4f}+60", placement=PlacementRule.CHANCE)[1]
        for name in ("p0", "p1")
    ]
    assert all(row.outcome is Outcome.OK for result in results for row in result.rows)
    first = sorted(result.rows[0].ttft_ms for result in results)
    assert first[0] == calm.ttft_ms  # the other one had the request
    assert first[1] == pytest.approx(calm.ttft_ms + lost_ms, abs=0.1)


def test_without_a_prefill_worker_a_first_turn_fails() -> None:
    _, result = simulated("1P_1pD", one(), "p0@0.5+60")
    assert [row.outcome for row in result.rows] == [Outcome.WORKER_ERROR]


@pytest.mark.parametrize("text", ["a0", "a0@3", "a0@3+0", "a0@-1+2", "@1+2", "a0@1+2x"])
def test_outages_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a0@30\+10"):
        Outage.parse(text)


def test_outages_must_fit_the_cluster() -> None:
    with pytest.raises(ConfigError, match="no worker 'd0'; there are p0, a0"):
        simulated("1P_1pD", one(), "d0@1+1")
    with pytest.raises(ConfigError, match="two outages of a0 overlap"):
        simulated("1P_1pD", one(), "a0@1+5", "p0@2+1", "a0@3+1")
