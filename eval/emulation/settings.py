"""What an emulated worker is started with: a file, and one environment variable that names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ppd.errors import ConfigError

from .drafts import Drafts

ENVIRONMENT = "SGLANG_EMULATION"  # PPD_* names are the plugin's


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one emulated worker.

    Attributes:
        worker: its name, and its end of the link.
        profile: a profile's name, or the path of its file.
        knobs: the shared file.
        trace: folder of the step traces.
        drafts: of speculative decoding; None: it is refused.
        ranks: of DP attention, each of them a device.
    """

    worker: str
    profile: str
    calibration: str
    knobs: str
    trace: str
    drafts: Drafts | None = None
    ranks: int = 1

    @property
    def steps_file(self) -> Path:
        """The file by which the ranks agree on their steps."""
        return Path(self.knobs).with_name(f"{self.worker}.steps")


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings of this worker.

    Raises:
        ConfigError: the variable is missing, or its file is wrong.
    """
    path = environment.get(ENVIRONMENT)
    if path is None:
        raise ConfigError(f"an emulated worker needs {ENVIRONMENT}, the path of its settings")
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: no settings of an emulated worker: {error}") from error
