"""``python -m eval.emulation.launch``: ``sglang.launch_server`` on an emulated device.

Only a process that is started through this module is emulated. The spawn method of
``multiprocessing`` runs the main module again in each child of the server. So the stand-ins and
the hooks reach every process of it, and each has a device of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from ppd.errors import ConfigError
from sglang_patches.cpu import stand_ins

from ..profiles.profile import load_profile
from .device import Device, event_class
from .hooks import Emulation
from .knobs import SharedKnobs
from .link import Link
from .settings import read_settings

stand_ins.install()


def install() -> None:
    """Put the device's events in place, and register the hooks.

    SGLang applies hooks when it has loaded its plugins, in each process.

    Raises:
        SystemExit: the settings are wrong, or a hook does not fit the installed SGLang.
    """
    import torch

    from sglang_patches.targets import register_all

    try:
        settings = read_settings(os.environ)
        profile = load_profile(settings.profile, settings.calibration)
        knobs = SharedKnobs(Path(settings.knobs))
        trace = Path(settings.trace) / f"{settings.worker}-{os.getpid()}.jsonl"
        device = Device(profile, knobs, trace)
        link = Link(settings.worker, profile.kv_bytes_per_token, knobs)
        setattr(torch.cpu, "Event", event_class(device))  # noqa: B010 (mypy: it is a type)
        register_all(Emulation(device, link, settings).hooks())
    except ConfigError as error:
        raise SystemExit(f"emulation: {error}") from error


install()


def main() -> None:
    """Run ``sglang.launch_server`` in this process."""
    from sglang_patches.cpu.launch import main as launch

    launch(forks=False)


if __name__ == "__main__":
    main()
