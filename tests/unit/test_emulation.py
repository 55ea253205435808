"""The emulated device, its link, its traces, and what turns on it should take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.emulation.check_rows import largest_error, summarize
from eval.emulation.collective import Collective
from eval.emulation.device import Device, Work, event_class
from eval.emulation.hooks import step_of
from eval.emulation.knobs import Knobs, SharedKnobs
from eval.emulation.predictions import Cell, Way, decode_ms, predicted_ttft_ms
from eval.emulation.settings import ENVIRONMENT, read_settings
from eval.emulation.traces import (
    DeviceUse,
    RefusedRunError,
    device_use,
    extends_of,
    read_steps,
)
from eval.profiles.profile import Extend, Step, load_profile
from ppd.errors import ConfigError, PpdError

PROFILE = load_profile("llama-3.1-8b-h100-tp1")


@dataclass
class Clock:
    """A clock that a sleep moves."""

    now_s: float = 100.0
    oversleeps_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + self.oversleeps_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def knobs(tmp_path: Path) -> Iterator[SharedKnobs]:
    with closing(
        SharedKnobs.create(tmp_path / "knobs", Knobs(slow_motion=10.0, link_gbps=100.0))
    ) as knobs:
        yield knobs


@pytest.fixture
def device(tmp_path: Path, knobs: SharedKnobs, clock: Clock) -> Iterator[Device]:
    with closing(Device(PROFILE, knobs, tmp_path / "d0-1.jsonl", clock, clock.sleep)) as device:
        yield device


STEP = Step((), 8, 8 * 1024)
STEP_S = 10 * PROFILE.step_ms(STEP) / 1e3


def test_a_launch_returns_at_once_and_an_event_waits_for_it(device: Device, clock: Clock) -> None:
    event = event_class(device)()
    assert event.query()
    device.launch(STEP)
    event.record()
    assert not clock.slept_s
    event.synchronize()
    assert clock.now_s == pytest.approx(100 + STEP_S)
    event.synchronize()
    assert len(clock.slept_s) == 1


def test_steps_follow_each_other_and_slow_motion_changes_while_it_runs(
    device: Device, knobs: SharedKnobs
) -> None:
    device.launch(STEP)
    device.launch(STEP)
    assert device.free_at_s == pytest.approx(100 + 2 * STEP_S)
    knobs.set(Knobs(slow_motion=20.0))
    device.launch(STEP)
    assert device.free_at_s == pytest.approx(100 + 4 * STEP_S)


def test_ranks_begin_and_end_their_steps_together(tmp_path: Path) -> None:
    """Each in a thread, at times that differ by chance: no step is read before it is whole."""
    ranks, steps = 3, 200
    path = tmp_path / "steps"
    Collective.create(path, ranks)

    def parts(rank: int) -> list[tuple[float, float]]:
        source = random.Random(rank)
        return [(source.uniform(0, 5), source.choice((0.0, source.random()))) for _ in range(steps)]

    def run(rank: int) -> list[tuple[float, float]]:
        collective = Collective(path, rank, ranks)
        source = random.Random(-rank)
        agreed = []
        for part in parts(rank):
            if source.random() < 0.2:
                time.sleep(source.random() / 1e3)  # not to wait for anything: to be late
            agreed.append(collective.agree(*part))
        return agreed

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    whole = zip(*(parts(rank) for rank in range(ranks)), strict=True)
    expected = [tuple(max(one) for one in zip(*step, strict=True)) for step in whole]
    assert found == [expected] * ranks


def test_a_rank_without_work_waits_for_the_step_of_the_others(
    tmp_path: Path, knobs: SharedKnobs
) -> None:
    path = tmp_path / "steps"
    Collective.create(path, 2)
    devices = [Device(PROFILE, knobs, tmp_path / f"d0-{rank}.jsonl") for rank in (0, 1)]
    for rank, device in enumerate(devices):
        device.join(Collective(path, rank, 2))
    launched_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(devices[0].launch, STEP)
        pool.submit(devices[1].launch_nothing)
    ends = [device.free_at_s for device in devices]
    assert ends[0] == ends[1] > launched_s
    for device in devices:
        device.close()
    assert [len(list(read_steps(tmp_path / f"d0-{rank}.jsonl"))) for rank in (0, 1)] == [1, 0]


def test_a_rank_that_is_left_alone_ends(tmp_path: Path, clock: Clock) -> None:
    Collective.create(tmp_path / "steps", 2)
    with pytest.raises(PpdError, match="another rank"):
        Collective(tmp_path / "steps", 0, 2, clock, clock.sleep).agree(0.0, 1.0)


def test_a_poll_of_an_event_takes_a_millisecond_at_most(device: Device, clock: Clock) -> None:
    event = event_class(device)()
    device.launch(STEP)
    event.record()
    while not event.query():
        pass
    assert max(clock.slept_s) <= 0.001
    assert clock.now_s == pytest.approx(device.free_at_s)


def test_idle_time_counts_only_while_work_was_there(
    device: Device, clock: Clock, tmp_path: Path
) -> None:
    def run(requests: set[str], queued_s: float, after_s: float) -> None:
        clock.now_s = max(clock.now_s, device.free_at_s) + after_s
        device.plan(Work(frozenset(requests), queued_s))
        device.launch(STEP)

    run({"a"}, 0.0, 5.0)  # not known since when
    run({"a"}, 0.0, 0.25)  # it was in the step before
    run({"b"}, device.free_at_s + 0.9, 1.0)  # queued for the last 0.1 s
    run({"c"}, device.free_at_s + 0.99, 1.0)  # launched from idle in 10 ms
    run({"d"}, device.free_at_s - 0.01, 0.01)  # it was queued while the step before ran
    bubbles = [step.bubble_s for step in read_steps(tmp_path / "d0-1.jsonl")]
    assert bubbles == pytest.approx([0.0, 0.25, 0.085, 0.0, 0.01], abs=1e-5)
    use = device_use(tmp_path, 0.0, 1e9)
    assert use.steps == 5
    assert use.bubble_share == pytest.approx(0.345 / (0.345 + 5 * STEP_S), abs=1e-4)
    with pytest.raises(RefusedRunError, match=r"idle for .* more slow motion"):
        use.require_valid()


def test_a_stall_of_the_host_refuses_the_run(device: Device, clock: Clock, tmp_path: Path) -> None:
    clock.oversleeps_s = 0.3  # 30 ms of the device
    event = event_class(device)()
    for _ in range(2):
        device.launch(STEP)
        event.record()
        event.synchronize()
    use = device_use(tmp_path, 0.0, 1e9)
    assert use.longest_stall_ms == pytest.approx(30, abs=0.1)
    with pytest.raises(RefusedRunError, match=r"at 1 of 2 steps, for 30.0 at most"):
        use.require_valid()


def test_a_rare_stall_refuses_no_long_run() -> None:
    """One step of a thousand may begin late: it moves few turns."""
    use = DeviceUse(2000, {}, 0.0, 7.2, 2, 0)
    use.require_valid()
    with pytest.raises(RefusedRunError, match=r"at 3 of 2,000 steps"):
        replace(use, stalled=3).require_valid()


def test_prefills_are_found_by_worker(device: Device, tmp_path: Path) -> None:
    device.launch(Step((Extend(200, 8192),)))
    device.launch(STEP)
    assert extends_of(tmp_path, "d0", 0.0) == 1
    assert extends_of(tmp_path, "p0", 0.0) == 0


def test_a_transfer_waits_for_both_ends(knobs: SharedKnobs) -> None:
    kv_bytes = int(100e9 / 8 / 10)  # a tenth of a second, and slow motion is 10
    assert knobs.reserve("p0", "d0", kv_bytes, 100.0) == pytest.approx((100, 101))
    assert knobs.reserve("p0", "d1", kv_bytes, 100.0) == pytest.approx((101, 102))
    assert knobs.reserve("p1", "d0", kv_bytes, 100.5) == pytest.approx((101, 102))
    assert knobs.reserve("p1", "d2", kv_bytes, 103.0) == pytest.approx((103, 104))
    knobs.set(Knobs(10.0, link_gbps=25.0, link_latency_ms=100.0))
    assert knobs.reserve("p2", "d3", kv_bytes, 100.0) == pytest.approx((100, 105))
    assert knobs.sent_bytes("p0") == 2 * kv_bytes


def test_other_processes_see_the_knobs(knobs: SharedKnobs, tmp_path: Path) -> None:
    with closing(SharedKnobs(tmp_path / "knobs")) as other:
        knobs.set(Knobs(40.0, 400.0, 0.5))
        assert other.get() == Knobs(40.0, 400.0, 0.5)


@pytest.mark.parametrize(
    "make",
    [lambda: Knobs(0.5), lambda: Knobs(float("nan")), lambda: Knobs(1, 0), lambda: Knobs(1, 1, -1)],
)
def test_knobs_have_bounds(make: Callable[[], Knobs]) -> None:
    with pytest.raises(ConfigError, match="must"):
        make()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file of an emulation"):
        SharedKnobs(tmp_path / "absent")
    (tmp_path / "other").write_bytes(bytes(100_000))
    with pytest.raises(ConfigError, match="no file of this version"):
        SharedKnobs(tmp_path / "other")


def test_a_worker_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=ENVIRONMENT):
        read_settings({})
    (tmp_path / "w.json").write_text('{"worker": "p0", "colour": 1}')
    with pytest.raises(ConfigError, match="no settings of an emulated worker"):
        read_settings({ENVIRONMENT: str(tmp_path / "w.json")})


class Mode:
    """A forward mode of SGLang."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Callable[[], bool]:
        return lambda: name == f"is_{self.name}"


def test_the_shape_of_a_forward_batch() -> None:
    import torch

    def batch(mode: str, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(forward_mode=Mode(mode), **fields)

    assert step_of(batch("idle")) is None
    assert step_of(batch("decode", seq_lens_cpu=torch.tensor([10, 20]))) == Step((), 2, 30)
    lengths = {"extend_seq_lens_cpu": [200, 1], "extend_prefix_lens_cpu": [8192, 99]}
    assert step_of(batch("mixed", **lengths)) == Step((Extend(200, 8192),), 1, 100)
    alone = Step((Extend(200, 8192), Extend(1, 99)))
    assert step_of(batch("extend", **lengths)) == alone


def test_predictions_of_turns_on_idle_workers() -> None:
    def ttft_ms(way: Way, gbps: float) -> float:
        return predicted_ttft_ms(PROFILE, Cell(way, 8192, gbps, 0), 8192, 0)

    def prefill_ms(new: int, cached: int) -> float:
        return PROFILE.step_ms(Step((Extend(new, cached),)))

    assert ttft_ms(Way.LOCAL, 25) == prefill_ms(200, 8192)
    assert ttft_ms(Way.DELTA, 25) == prefill_ms(204, 8188) + PROFILE.transfer_ms(200, 25)
    assert ttft_ms(Way.FULL, 100) == prefill_ms(204, 8188) + PROFILE.transfer_ms(8392, 100)
    assert ttft_ms(Way.TURN1, 100) == prefill_ms(8188, 0) + PROFILE.transfer_ms(8188, 100)


def test_chunks_are_transferred_beside_the_next_chunk() -> None:
    cell = Cell(Way.TURN1, 8192, 100, 0)
    whole = predicted_ttft_ms(PROFILE, cell, 8192, 0)
    chunked = predicted_ttft_ms(PROFILE, cell, 2048, 0)
    computed = sum(
        PROFILE.step_ms(Step((Extend(tokens, 2048 * i),)))
        for i, tokens in enumerate((2048, 2048, 2048, 2044))
    )
    assert chunked == pytest.approx(computed + PROFILE.transfer_ms(2044, 100))
    assert chunked < whole


def test_a_turn_beside_decodes_waits_for_their_steps() -> None:
    step_ms = decode_ms(PROFILE, 32, 1024)
    local = predicted_ttft_ms(PROFILE, Cell(Way.LOCAL, 8192, 25, 32), 8192, 1024)
    mixed = PROFILE.step_ms(Step((Extend(200, 8192),), 32, 32 * 1024))
    assert local == pytest.approx(1.5 * step_ms + mixed)
    remote = predicted_ttft_ms(PROFILE, Cell(Way.DELTA, 8192, 25, 32), 8192, 1024)
    alone = predicted_ttft_ms(PROFILE, Cell(Way.DELTA, 8192, 25, 0), 8192, 0)
    assert alone < remote <= alone + 1.5 * step_ms


def test_a_check_is_summarized_by_medians() -> None:
    prediction = {"row": "prediction", "cell": "a", "predicted_ms": 10.0, "kv_bytes": 7}
    prediction |= {"route": "remote", "slow_motion": 40.0, "cached_tokens": 5}
    turn = {**prediction, "row": "turn", "bubble_share": 0.001}
    times = (10.2, 10.9, 30.0)
    turns = [{**turn, "repeat": i, "measured_ms": ms} for i, ms in enumerate(times)]
    summary = summarize([prediction, *turns])
    assert summary["cells"][0] == {
        "name": "a",
        "predicted_ms": 10.0,
        "measured_ms": 10.9,
        "cached_tokens": 5,
        "kv_bytes": 7,
        "route": "remote",
        "repeats": [10.2, 10.9, 30.0],
        "k": 40.0,
    }
    assert largest_error(summary) == pytest.approx(0.09)
    with pytest.raises(PpdError, match="kv_bytes 8, predicted 7"):
        summarize([prediction, {**turns[0], "kv_bytes": 8}])
    with pytest.raises(PpdError, match="no turn"):
        summarize([prediction])
