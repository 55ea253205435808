"""The simulator with a profile: its costs, the overlap of steps, runs of the emulation."""

from __future__ import annotations

import random
from functools import partial

import pytest

from eval.emulation.clusters import Run
from eval.emulation.compare import middle, simulate, values
from eval.profiles.files import FOLDER, read_file
from eval.profiles.profile import Extend as ProfileExtend
from eval.profiles.profile import Step, load_profile
from eval.simulation.clock import Clock
from eval.simulation.cost_model import Extend, paper_model
from eval.simulation.engine import Engine, Job
from eval.simulation.fitted_profile import fitted_profile
from eval.simulation.lockstep import Lockstep
from eval.simulation.planned import simulated
from eval.simulation.profile_costs import ProfileCosts
from eval.simulation.simulator import Simulation
from eval.simulation.traffic import Clients, TurnTokens
from eval.simulation.traffic import Conversation as SimulatedTalk
from eval.simulation.workers import Shape
from eval.traffic.conversations import Conversation, PlannedTurn
from ppd.decision import Route
from ppd.errors import ConfigError
from ppd.policies import static_policy

NAME = "llama-3.1-8b-h100-tp1"
PROFILE = load_profile(NAME)
COSTS = ProfileCosts(PROFILE, 100.0)


def test_steps_are_those_of_the_profile() -> None:
    assert COSTS.kv_capacity_tokens == PROFILE.kv_pool_tokens
    assert COSTS.transfer_ms == pytest.approx(0.010486, abs=1e-6)
    found = COSTS.step_ms(8, 8 * 1000, [Extend(200, 8192)])
    assert found == PROFILE.step_ms(Step((ProfileExtend(200, 8192),), 8, 8 * 1001))


@pytest.mark.parametrize("ms", [0.0, 5.0, 100.0, 1000.0])
def test_decode_steps_are_the_inverse_of_their_time(ms: float) -> None:
    steps = COSTS.decode_steps(ms, 16, 16 * 2000)
    assert COSTS.decode_ms(steps, 16, 16 * 2000) >= ms - 1e-6
    assert steps == 1 or COSTS.decode_ms(steps - 1, 16, 16 * 2000) < ms


@pytest.mark.parametrize("context_tokens", [5, 300, 900, 2000])
def test_decode_steps_are_the_fewest(context_tokens: int) -> None:
    """Also where a step gets shorter with more context, as this profile has it from 512 tokens."""
    assert COSTS.step_ms(2, 2 * 1000, []) < COSTS.step_ms(2, 2 * 512, [])
    source = random.Random(0)
    for _ in range(1000):
        ms = source.uniform(7000.0, 9000.0)
        steps = COSTS.decode_steps(ms, 2, context_tokens)
        assert COSTS.decode_ms(steps, 2, context_tokens) >= ms - 1e-6
        assert steps == 1 or COSTS.decode_ms(steps - 1, 2, context_tokens) < ms - 1e-6


def _beside_decodes(*, overlap: bool, has_kv: bool) -> tuple[float, float]:
    """When a job that comes in mid-step gives its first token, and how long a step takes."""
    clock = Clock()
    costs = ProfileCosts(PROFILE, 100.0, overlap=overlap)
    engine = Engine(costs, Lockstep(clock.at), 8192, None)
    first: list[float] = []
    engine.submit(Job(1, 1000, 200, True, lambda _: None), 0.0)
    step_ms = COSTS.step_ms(1, 1000, [])
    job = Job(2, 2000, 8, has_kv, lambda _: None, first=first.append)
    clock.at(10.5 * step_ms, lambda now_ms: engine.submit(job, now_ms))
    clock.run()
    return first[0] - 10.5 * step_ms, step_ms


def test_with_overlap_a_prefill_beside_decodes_starts_a_step_later() -> None:
    plain_ms, step_ms = _beside_decodes(overlap=False, has_kv=False)
    later_ms, _ = _beside_decodes(overlap=True, has_kv=False)
    assert later_ms - plain_ms == pytest.approx(step_ms, rel=0.02)


def test_with_overlap_a_first_token_comes_with_its_kv() -> None:
    plain_ms, step_ms = _beside_decodes(overlap=False, has_kv=True)
    at_once_ms, _ = _beside_decodes(overlap=True, has_kv=True)
    assert at_once_ms == pytest.approx(0.5 * step_ms, rel=0.1)
    assert plain_ms - at_once_ms == pytest.approx(step_ms, rel=0.1)


def test_kv_that_is_yet_to_come_has_a_place() -> None:
    clock = Clock()
    engine = Engine(COSTS, Lockstep(clock.at), 8192, None)
    capacity = engine.cache.capacity_tokens
    placed: list[int] = []
    ended: list[float] = []
    jobs = [Job(session, capacity * 6 // 10, 8, True, ended.append) for session in (1, 2)]
    for job in jobs:
        job.reserved = partial(lambda session, _: placed.append(session), job.session)
        engine.submit(job, 0.0)
    clock.run()
    assert placed == [1], "there is no place for both"
    assert engine.cache.free_tokens == capacity - jobs[0].kv_tokens
    engine.release(jobs[0], 1.0)
    clock.run()
    assert placed == [1, 2]
    engine.deliver(jobs[1], 2.0)
    clock.run()
    assert len(ended) == 1
    assert engine.cache.free_tokens == capacity
    assert engine.cache.cached_tokens(2) == jobs[1].prompt_tokens + 7


def test_waiting_turns_leave_no_room_for_idle_conversations() -> None:
    """A queue at the prefill worker holds KV on the decode worker, as SGLang's does."""
    tokens = PROFILE.kv_pool_tokens // 4
    talk = (TurnTokens(tokens, 2), TurnTokens(50, 2))
    conversations = [SimulatedTalk(0, 0.0, talk, (60.0,))]
    conversations += [SimulatedTalk(n, 30.0, talk[:1], ()) for n in range(1, 6)]
    simulation = Simulation(COSTS, Shape.parse("1P_1pD"), static_policy("full"), Clients(), 0)
    rows = simulation.run(conversations).rows
    (later,) = (row for row in rows if row.turn == 2)
    assert later.route is Route.REMOTE, "its KV was evicted for those that wait"


@pytest.mark.parametrize("policy", ["full", "pd"])
def test_an_emulated_run_is_simulated_on_its_own_inputs(policy: str) -> None:
    run = Run("turns:3?first=2048&new=128&out=32&think_s=1", policy, 2.0, 0, 6, 40.0, 100.0)
    turns = simulate(run, "1P1D", NAME, "device")
    assert len(turns) == 18
    found = values(turns)
    prefill_ms = PROFILE.step_ms(Step((ProfileExtend(2048, 0),)))
    assert middle(found["t1_ttft_p50_ms"]) == pytest.approx(
        prefill_ms + PROFILE.transfer_ms(2048, 100), rel=0.3
    )
    assert {turn.route.value for turn in turns if turn.turn > 1} == {
        "local" if policy == "full" else "remote"
    }


def test_the_papers_machine_is_a_profile() -> None:
    model, name = paper_model(), "llama-3.1-8b-h100-vllm"
    assert read_file(FOLDER / f"{name}.json") == fitted_profile(model)
    costs = ProfileCosts(load_profile(name), model.serving.link_bytes_per_s * 8 / 1e9)
    assert (costs.request_ms, costs.handover_ms) == (model.request_ms, model.handover_ms)
    assert costs.overlap is model.overlap is False
    assert costs.kv_capacity_tokens == model.kv_capacity_tokens
    assert costs.transfer_ms == pytest.approx(model.transfer_ms)
    shapes = [(0, 0, [Extend(512, 0)]), (0, 0, [Extend(8192, 0)]), (0, 0, [Extend(1024, 8192)])]
    shapes += [(32, 32 * 2048, []), (16, 16 * 8192, [Extend(512, 4096)])]
    for sequences, context, extends in shapes:
        # A profile counts the token that a decode step adds to a context.
        found = costs.step_ms(sequences, context - sequences, extends)
        assert found == pytest.approx(model.step_ms(sequences, context, extends), rel=0.01)


def test_pauses_of_two_kinds_are_refused() -> None:
    turns = (PlannedTurn(10, 1), PlannedTurn(10, 1, think_s=1.0, gap_s=1.0))
    with pytest.raises(ConfigError, match="two kinds"):
        simulated([Conversation(0.0, turns)])
    timed = (PlannedTurn(10, 1), PlannedTurn(10, 1, gap_s=3.0))
    (found,) = simulated([Conversation(0.0, timed)])
    assert found.since_arrival
    assert found.think_s == (3.0,)


def test_a_reply_that_is_not_sent_back_is_no_cut() -> None:
    turns = (
        PlannedTurn(100, 20),
        PlannedTurn(30, 5, keep_tokens=100),
        PlannedTurn(10, 5),
        PlannedTurn(10, 5, keep_tokens=50),
    )
    planned = [Conversation(0.0, turns)]
    with pytest.raises(ConfigError, match="cuts the history"):
        simulated(planned)
    (found,) = simulated(planned, end_at_cuts=True)
    assert [turn.drops_reply for turn in found.turns] == [False, True, False]
    assert len(found.think_s) == 2
