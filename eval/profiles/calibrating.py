"""Fits a calibration: from a profile's device times to the measured step times of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ppd.errors import ConfigError

from .files import Calibration, ProfileFile
from .profile import Extend, Profile, Step

_DEVICE = Calibration("device", 1.0, 0.0, "")


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that was measured on an engine.

    Attributes:
        extends: new and cached tokens of each sequence that is prefilled.
        sequences: that decode; they hold ``context_tokens`` together.
    """

    measured_ms: float
    extends: tuple[tuple[int, int], ...] = ()
    sequences: int = 0
    context_tokens: int = 0

    def step(self) -> Step:
        """Return its shape."""
        extends = tuple(Extend(new, cached) for new, cached in self.extends)
        return Step(extends, self.sequences, self.context_tokens)


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read measured steps: a JSON list.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        steps = msgspec.json.decode(path.read_bytes(), type=list[MeasuredStep])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: no list of measured steps: {error}") from error
    if any(step.measured_ms <= 0 for step in steps):
        raise ConfigError(f"{path}: measured_ms must be above 0")
    return steps


def calibrated(
    file: ProfileFile, name: str, steps: Sequence[MeasuredStep], source: str
) -> ProfileFile:
    """Return a profile with a calibration that is fitted to measured steps.

    The sum of the squared relative errors is the least. A calibration of that name is replaced.

    Args:
        source: where the steps were measured.

    Raises:
        ConfigError: there are too few steps, or all take the same time, or the fit makes no sense.
    """
    if name == _DEVICE.name:
        raise ConfigError(f"the calibration {name!r} changes nothing and stays as it is")
    device = Profile(file, _DEVICE)
    pairs = [(device.step_ms(step.step()), step.measured_ms) for step in steps]
    # Minimise the sum of (factor * x + constant * y - 1)^2 with x = device / measured, y = 1 / it.
    xx = sum((d / m) ** 2 for d, m in pairs)
    xy = sum(d / m**2 for d, m in pairs)
    yy = sum(1 / m**2 for _, m in pairs)
    x, y = sum(d / m for d, m in pairs), sum(1 / m for _, m in pairs)
    determinant = xx * yy - xy * xy
    if len(pairs) < 3 or determinant <= 1e-9 * xx * yy:
        raise ConfigError("a calibration needs three or more steps of different lengths")
    factor = (x * yy - y * xy) / determinant
    constant_ms = (y * xx - x * xy) / determinant
    if factor <= 0 or constant_ms < 0:
        raise ConfigError(
            f"the fit makes no sense: factor {factor:.3g}, constant {constant_ms:.3g} ms a step"
        )
    worst = max(abs((factor * d + constant_ms) / m - 1) for d, m in pairs)
    fitted = Calibration(
        name,
        round(factor, 5),
        round(constant_ms, 5),
        f"{source}; {len(pairs)} steps, largest error {worst:.1%}",
    )
    kept = tuple(one for one in file.calibrations if one.name != name)
    return msgspec.structs.replace(file, calibrations=(*kept, fitted))
