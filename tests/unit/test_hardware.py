"""What a worker reports of its machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_patches.hardware import hardware_of, link_gbps_of
from sglang_patches.settings import Settings


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name, rate in (("mlx5_0", "400 Gb/sec (4X NDR)"), ("mlx5_1", "100 Gb/sec (4X EDR)")):
        (tmp_path / name / "ports/1").mkdir(parents=True)
        (tmp_path / name / "ports/1/rate").write_text(rate + "\n")
    (tmp_path / "odd/ports/1").mkdir(parents=True)
    (tmp_path / "odd/ports/1/rate").write_text("fast\n")
    (tmp_path / "bare").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("named", "gbps"),
    [
        ("mlx5_0", 400.0),
        ("mlx5_0, mlx5_1", 500.0),
        (None, None),
        ("", None),
        ("mlx5_0,mlx5_9", None),
        ("odd", None),
        ("bare", None),
        ('{"0": "mlx5_0"}', None),
    ],
)
def test_the_link_is_that_of_the_named_devices(
    devices: Path, named: str | None, gbps: float | None
) -> None:
    assert link_gbps_of(named, devices) == gbps


def test_a_cpu_has_no_gpu_and_the_operators_link() -> None:
    args = SimpleNamespace(device="cpu", disaggregation_ib_device=None)
    found = hardware_of(SimpleNamespace(server_args=args), Settings(link_gbps=25.0))
    assert (found.gpu, found.link_gbps) == ("", 25.0)
