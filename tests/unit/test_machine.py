"""GPUs by their many names, and tables that hold for some machines."""

from __future__ import annotations

import pytest

from ppd.machine import Machine, gpu_name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("NVIDIA H100 80GB HBM3", "H100 SXM", "h100_sxm", "H100"), "H100"),
        (("NVIDIA H200", "h200_sxm", "NVIDIA H200 141GB HBM3e"), "H200"),
        (("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"), "A100"),
        (("NVIDIA H100 PCIe", "H100 PCIe 80GB"), "H100 PCIE"),
        (("NVIDIA H100 NVL",), "H100 NVL"),
        (("NVIDIA L40S", "L40S"), "L40S"),
        (("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), "MI300X"),
        (("", "NVIDIA"), ""),
    ],
)
def test_all_spellings_of_a_gpu_are_one(names: tuple[str, ...], expected: str) -> None:
    assert {gpu_name(name) for name in names} == {expected}


TABLE = Machine("H100 SXM", 2, 100.0)


@pytest.mark.parametrize(
    ("worker", "fits"),
    [
        (Machine("NVIDIA H100 80GB HBM3", 2, 100.0), True),
        (Machine("NVIDIA H100 80GB HBM3", 2), True),
        (Machine("NVIDIA H100 80GB HBM3", 2, 150.0), True),
        (Machine("NVIDIA H100 80GB HBM3", 2, 70.0), True),
        (Machine("NVIDIA H100 80GB HBM3", 2, 400.0), False),
        (Machine("NVIDIA H100 80GB HBM3", 2, 25.0), False),
        (Machine("NVIDIA H100 80GB HBM3", 4, 100.0), False),
        (Machine("NVIDIA H100 80GB HBM3", 2, 100.0, ranks=2), False),
        (Machine("NVIDIA H100 PCIe", 2, 100.0), False),
        (Machine("", 2, 100.0), False),
    ],
)
def test_a_table_holds_for_its_machine_only(worker: Machine, fits: bool) -> None:
    assert TABLE.fits(worker) is fits


def test_no_machine_fits_one_without_a_gpu() -> None:
    assert not Machine("").fits(Machine(""))


def test_what_is_wrong_with_a_machine_is_named() -> None:
    problems = list(Machine("NVIDIA", 0, -1.0, ranks=0).problems())
    assert [problem.split()[0] for problem in problems] == [
        "machine.gpu",
        "machine.tensor_parallel",
        "machine.ranks",
        "machine.link_gbps",
    ]
    assert list(TABLE.problems()) == []
