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
    nobody: Any = SimpleNamespace()  # decodes alone concern neither queue nor telemetry
    return StepTimes(nobody, pacer, nobody, lag), pacer


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
