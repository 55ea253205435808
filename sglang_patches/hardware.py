"""The GPU and the link of a worker, as the driver and sysfs name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_patches.settings import Settings

_DEVICES = Path("/sys/class/infiniband")
_RATE = re.compile(r"([\d.]+) Gb/sec")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a server runs on.

    Attributes:
        gpu: the driver's name of its GPU; "": unknown, or none.
        link_gbps: gigabits a second of its link to other workers; None if unknown.
    """

    gpu: str
    link_gbps: float | None


def hardware_of(scheduler: Any, settings: Settings) -> Hardware:
    """What a scheduler runs on; a link that is an option takes precedence."""
    devices = scheduler.server_args.disaggregation_ib_device
    return Hardware(_gpu_of(scheduler), settings.link_gbps or link_gbps_of(devices))


def _gpu_of(scheduler: Any) -> str:
    """The driver's name of a scheduler's GPU; "" on a CPU and on other devices than CUDA's."""
    if scheduler.server_args.device != "cuda":
        return ""
    import torch

    return str(torch.cuda.get_device_name(scheduler.gpu_id))


def link_gbps_of(devices: str | None, root: Path = _DEVICES) -> float | None:
    """The rate of the RDMA devices that ``--disaggregation-ib-device`` names, together.

    Args:
        devices: names, separated by commas. Its other form, JSON by GPU, is not read.
        root: of the devices in sysfs.

    Returns:
        Gigabits a second. None if no device is named, or one of them has no rate there.
    """
    total = 0.0
    for name in filter(None, map(str.strip, (devices or "").split(","))):
        ports = sorted((root / name / "ports").glob("*/rate"))
        try:
            found = _RATE.match(ports[0].read_text())
        except (IndexError, OSError):
            return None
        if found is None:
            return None
        total += float(found[1])
    return total or None
