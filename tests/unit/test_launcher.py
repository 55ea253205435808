"""How workers share the cores of a machine."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from eval.cluster import Launcher, core_share, free_port, gpu_flags, share_flags
from ppd.contract import Role


@pytest.mark.parametrize(
    ("cores", "workers", "share"), [(2, 1, 2), (2, 2, 1), (2, 3, 1), (16, 3, 5), (1, 2, 1)]
)
def test_cores_are_divided_among_workers(
    cores: int, workers: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    assert core_share(workers) == share


@pytest.mark.skipif(bool(gpu_flags(0, 1)), reason="a machine with GPUs shares those")
def test_workers_that_are_never_busy_together_share_no_cores() -> None:
    assert share_flags(0, 3, busy=1) == share_flags(2, 1)
    assert share_flags(1, 3) == ["--cpu-threads", str(core_share(3))]


def test_ports_are_not_those_that_mooncake_chooses_from(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([15_000, 16_094, 17_000, 14_999])
    monkeypatch.setattr(random, "choice", lambda _ports: next(drawn))
    assert free_port() == 14_999


@pytest.mark.parametrize(("flags", "given"), [((), True), (("--dp-size", "2"), False)])
def test_a_worker_of_one_rank_has_a_port_that_no_connection_takes(
    flags: Sequence[str], given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(Launcher, "spawn", lambda _self, _log, argv, _core: commands.append(argv))
    with ExitStack() as stack:
        Launcher(tmp_path, stack).worker(Role.DECODE, "model", *flags)
        stack.pop_all()  # nothing was started
    assert ("--nccl-port" in commands[0]) == given
