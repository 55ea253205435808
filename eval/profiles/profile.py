"""A profile: the device time of every step of one model on one GPU.

A step is the sum of four tables. Products with weights, for a step with new tokens and for a step
that only decodes. Attention of one sequence's new tokens over its context. Attention of a batch
that decodes. A calibration turns device time into the step time of an engine. It owns no queue and
reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.errors import ConfigError

from .files import FOLDER, Calibration, ProfileFile, known, read_file
from .grid import Axis, Line, Plane


@dataclass(frozen=True, slots=True)
class Extend:
    """New tokens of one sequence in a step, after ``cached_tokens`` that are computed already."""

    new_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """The shape of one step.

    Attributes:
        extends: sequences with new tokens; a prompt or a chunk of one.
        sequences: that decode.
        context_tokens: that these hold together.
        width: tokens of each that decodes; more than one if a draft is verified.
    """

    extends: tuple[Extend, ...] = ()
    sequences: int = 0
    context_tokens: int = 0
    width: int = 1

    @property
    def new_tokens(self) -> int:
        """All new tokens of its extends."""
        return sum(extend.new_tokens for extend in self.extends)


class Profile:
    """What the steps of one model on one GPU take, by one calibration."""

    def __init__(self, file: ProfileFile, calibration: Calibration) -> None:
        self.file = file
        self.calibration = calibration
        tables = file.tables
        self._sequences = Axis("decoding sequences", tables.sequences)
        self._step = Line(Axis("tokens of a step", tables.step_tokens), tables.step_ms)
        self._extend = Plane(
            Axis("new tokens", tables.new_tokens),
            Axis("cached tokens", tables.cached_tokens),
            tables.extend_ms,
        )
        self._decode_step = Line(self._sequences, tables.decode_step_ms)
        self._decode = Plane(
            self._sequences, Axis("context tokens", tables.context_tokens), tables.decode_ms
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """The size of one token's KV."""
        return self.file.kv_bytes_per_token

    @property
    def kv_pool_tokens(self) -> int:
        """The tokens of KV that fit one worker."""
        return self.file.kv_pool_tokens

    def provenance(self) -> dict[str, object]:
        """Return the fields that name this profile in a row."""
        return {
            "profile": self.file.name,
            "profile_source": f"{self.file.source.package} {self.file.source.version}",
            "calibration": self.calibration.name,
            "calibration_factor": self.calibration.factor,
            "calibration_step_ms": self.calibration.step_ms,
        }

    def step_ms(self, step: Step) -> float:
        """Return the milliseconds of a step, calibrated.

        The tokens of a draft that is verified read the KV of their sequence together.

        Raises:
            OutsideProfileError: the shape lies beyond twice the range of the profile.
        """
        attention_ms = self._attention_ms(step.extends)
        if step.sequences:
            attention_ms += self._decode_attention_ms(step.sequences, step.context_tokens)
        decoded = step.sequences * step.width
        if step.extends:
            rest_ms = self._step.at(step.new_tokens + decoded)
        else:
            rest_ms = self._decode_products_ms(decoded)
        return self._calibrated_ms(rest_ms + attention_ms)

    def decode_step_ms(self, sequences: int, context_tokens: int) -> float:
        """Return what ``step_ms`` does for a step that only decodes; simulations take many.

        Raises:
            OutsideProfileError: the shape lies beyond twice the range of the profile.
        """
        attention_ms = self._decode_attention_ms(sequences, context_tokens)
        return self._calibrated_ms(self._decode_products_ms(sequences) + attention_ms)

    def _calibrated_ms(self, device_ms: float) -> float:
        return self.calibration.factor * device_ms + self.calibration.step_ms

    def _decode_products_ms(self, tokens: int) -> float:
        if tokens > self._sequences.points[-1]:
            return self._step.at(tokens)
        return self._decode_step.at(tokens)

    def _decode_attention_ms(self, sequences: int, context_tokens: int) -> float:
        return self._decode.at(sequences, context_tokens / sequences)

    def _attention_ms(self, extends: Sequence[Extend]) -> float:
        return sum(self._extend.at(one.new_tokens, one.cached_tokens) for one in extends)

    def covers(self, step: Step) -> bool:
        """Whether no table has to be continued beyond its range for a step."""
        tokens = step.new_tokens + step.sequences * step.width
        tokens_fit = not step.extends or self._step.axis.covers(tokens)
        mean_tokens = step.context_tokens / max(1, step.sequences)
        decodes_fit = not step.sequences or (
            self._sequences.covers(step.sequences) and self._decode.columns.covers(mean_tokens)
        )
        return (
            tokens_fit
            and decodes_fit
            and all(
                self._extend.rows.covers(one.new_tokens)
                and self._extend.columns.covers(one.cached_tokens)
                for one in step.extends
            )
        )

    def transfer_ms(self, tokens: int, gbps: float) -> float:
        """Return the milliseconds that the KV of ``tokens`` takes on a link of a bandwidth."""
        return self.kv_bytes_per_token * tokens * 8 / (gbps * 1e6)


def load_profile(name: str, calibration: str = "device") -> Profile:
    """Read a profile by its name, or by the path of its file.

    Raises:
        ConfigError: there is no such profile or calibration; or the file is of another format, has
            a field that is unknown, or has tables that do not fit together.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"no profile {name!r}; known: {', '.join(known())}; or a path to a .json")
    file = read_file(path)
    for one in file.calibrations:
        if one.name == calibration:
            return Profile(file, one)
    names = ", ".join(one.name for one in file.calibrations)
    raise ConfigError(f"profile {file.name} has no calibration {calibration!r}; it has {names}")
