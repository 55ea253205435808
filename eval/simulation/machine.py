"""A simulated cluster whose times come from a profile, as a configuration names it."""

from __future__ import annotations

import msgspec

from ppd.errors import ConfigError

from ..emulation.workers import APPEND_CHUNK, PREFILL_CHUNK
from ..profiles.profile import Profile, load_profile
from .profile_costs import ProfileCosts
from .workers import Chunking

# As SGLang on a GPU of 80 GB, and as the plugin on its decode workers.
CHUNKING = Chunking(PREFILL_CHUNK, APPEND_CHUNK)


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU with its link.

    Attributes:
        profile: the name of a profile, or the path of its file.
        link_gbps: gigabits a second of each worker's link.
        calibration: of the profile.
        slower: a further factor on every step; 1.4 for an engine that takes so many times as long.
    """

    profile: str
    link_gbps: float = 100.0
    calibration: str = "device"
    slower: float = 1.0

    def problem(self) -> str | None:
        """What is wrong with the values; None if nothing is."""
        if not 0 < self.link_gbps < float("inf"):
            return f"link_gbps must be above 0, got {self.link_gbps:g}"
        if not 0.1 <= self.slower <= 10:
            return f"slower must be a number from 0.1 to 10, got {self.slower:g}"
        return None

    def load(self) -> Profile:
        """Read the profile, with its calibration.

        Raises:
            ConfigError: there is no such profile or calibration, or a value is wrong.
        """
        if problem := self.problem():
            raise ConfigError(problem)
        found = load_profile(self.profile, self.calibration)
        if self.slower == 1.0:
            return found
        slowed = msgspec.structs.replace(
            found.calibration,
            name=f"{found.calibration.name} x {self.slower:g}",
            factor=found.calibration.factor * self.slower,
            step_ms=found.calibration.step_ms * self.slower,
        )
        return Profile(found.file, slowed)

    def costs(self) -> ProfileCosts:
        """Return what steps and transfers take.

        Raises:
            ConfigError: of :meth:`load`.
        """
        return ProfileCosts(self.load(), self.link_gbps)

    @property
    def name(self) -> str:
        """The name in tables: profile and calibration, with the link."""
        slower = "" if self.slower == 1.0 else f", {self.slower:g} times slower"
        return f"{self.profile}, {self.calibration}{slower}, {self.link_gbps:g} Gb/s"

    def provenance(self) -> dict[str, object]:
        """Return the fields that name this machine in a row."""
        return {**self.load().provenance(), "link_gbps": self.link_gbps}
