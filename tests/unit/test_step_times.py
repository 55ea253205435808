"""Which intervals between two schedulings are steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ppd.pacing import Pacer
from sglang_patches.step_times import StepTimes


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as long as it is not changed."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def make(lag: int) -> tuple[StepTimes, Pacer]:
    pacer = Pacer(full_chunk=512, page_size=1, mixed=True, target_ms=None, fixed_chunk=None)
    queue: Any = SimpleNamespace(requests=[])
    telemetry: Any = SimpleNamespace()  # decodes alone do not concern it
    return StepTimes(queue, pacer, telemetry, lag), pacer


class Reports:
    """What the telemetry gets."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []
        self.gaps_ms: list[float] = []

    def load(self, waiting: int, append_tokens: int, decode_ms: float | None) -> None:
        self.loads.append((waiting, append_tokens))

    def decode_gap(self, ms: float) -> None:
        self.gaps_ms.append(ms)


def reporting() -> tuple[StepTimes, Any, Reports]:
    """Step times, the queue that they watch, and what they report."""
    pacer = Pacer(full_chunk=512, page_size=1, mixed=True, target_ms=None, fixed_chunk=None)
    queue: Any = SimpleNamespace(requests=[])
    queue.append_tokens = lambda: 10 * len(queue.requests)
    reports: Any = Reports()
    return StepTimes(queue, pacer, reports, 0), queue, reports


def decode(times: StepTimes, seconds: list[float], ms: float) -> None:
    times.begin()
    times.decodes()
    seconds[0] += ms / 1e3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_takes_until_the_next_is_scheduled(lag: int, seconds: list[float]) -> None:
    times, pacer = make(lag)
    for _ in range(3):
        decode(times, seconds, 5.0)
    times.begin()
    assert pacer.decode_ms == pytest.approx(5.0)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_pause_is_no_step(lag: int, seconds: list[float]) -> None:
    times, pacer = make(lag)
    for _ in range(3):
        decode(times, seconds, 5.0)
    times.interrupted()
    seconds[0] += 60.0
    for _ in range(3):
        decode(times, seconds, 5.0)
    times.begin()
    assert pacer.decode_ms == pytest.approx(5.0)


@pytest.mark.parametrize("idle", [False, True])
def test_requests_that_leave_without_a_prefill_wait_no_longer(idle: bool) -> None:
    times, queue, reports = reporting()
    queue.requests = ["one", "two"]
    times.begin()
    times.decodes()
    queue.requests = []  # aborted
    if idle:
        times.interrupted()
    times.begin()
    assert reports.loads == [(2, 20), (0, 0)]
    times.begin()
    assert len(reports.loads) == 2, "nothing has changed"


def test_only_a_rank_that_decodes_has_a_gap(seconds: list[float]) -> None:
    times, _, reports = reporting()
    for decoding in (False, True):
        times.begin()
        times.peer_prefills(decoding=decoding)
        seconds[0] += 0.02
    times.begin()
    assert reports.gaps_ms == [pytest.approx(20.0)]
