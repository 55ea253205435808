"""A profile: the device time of every step of one model on one GPU, read from a small JSON file.

A step is the sum of four tables. Products with weights, for a step with new tokens and for a step
that only decodes. Attention of one sequence's new tokens over its context. Attention of a batch
that decodes. A calibration turns device time into the step time of an engine. It owns no queue and
reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.errors import ConfigError

from .grid import Axis, Line, Plane

FORMAT = 1
FOLDER = Path(__file__).parent / "data"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers of a profile come from, and under which license.

    Attributes:
        options: given to the package, beside model, GPU and tensor parallelism.
    """

    package: str
    version: str
    license: str
    attribution: str
    url: str
    model: str
    system: str
    backend: str
    backend_version: str
    options: dict[str, str | int]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From device time to an engine's step time: ``factor * device_ms + step_ms``.

    Attributes:
        source: what it was fitted to.
    """

    name: str
    factor: float
    step_ms: float
    source: str


class Interpolation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the tables are from the package's own answers, at random shapes in their range.

    Attributes:
        steps: how many prefill steps and how many decode steps were compared.
        seed: of the random shapes.
        median_error: relative.
        max_error: relative.
        worst: the shape of the largest error.
    """

    method: str
    steps: int
    seed: int
    median_error: float
    p99_error: float
    max_error: float
    worst: str


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds on the device.

    Attributes:
        step_tokens: axis of ``step_ms``: tokens that a step with new tokens computes.
        step_ms: all but attention.
        new_tokens: rows of ``extend_ms``.
        cached_tokens: columns of ``extend_ms``.
        extend_ms: attention of one sequence's new tokens.
        sequences: axis of ``decode_step_ms``, and rows of ``decode_ms``.
        decode_step_ms: of a step that only decodes, all but attention.
        context_tokens: columns of ``decode_ms``, the mean context of the batch.
        decode_ms: attention of a batch that decodes.
    """

    step_tokens: tuple[float, ...]
    step_ms: tuple[float, ...]
    new_tokens: tuple[float, ...]
    cached_tokens: tuple[float, ...]
    extend_ms: tuple[tuple[float, ...], ...]
    sequences: tuple[float, ...]
    decode_step_ms: tuple[float, ...]
    context_tokens: tuple[float, ...]
    decode_ms: tuple[tuple[float, ...], ...]


class ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a profile.

    Attributes:
        kv_bytes_per_token: of the whole worker, all its GPUs together.
        kv_pool_tokens: tokens of KV that fit a worker.
        kv_pool: how that number was computed.
        links_gbps: links to choose from, in gigabits a second for a worker.
    """

    format: int
    name: str
    model: str
    gpu: str
    tensor_parallel: int
    kv_bytes_per_token: int
    kv_pool_tokens: int
    kv_pool: str
    links_gbps: tuple[float, ...]
    source: Source
    interpolation: Interpolation
    calibrations: tuple[Calibration, ...]
    tables: Tables


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
        sequences: that decode one token each.
        context_tokens: that these hold together.
    """

    extends: tuple[Extend, ...] = ()
    sequences: int = 0
    context_tokens: int = 0

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

        Raises:
            OutsideProfileError: the shape lies beyond twice the range of the profile.
        """
        attention_ms = self._attention_ms(step.extends)
        if step.sequences:
            mean_tokens = step.context_tokens / step.sequences
            attention_ms += self._decode.at(step.sequences, mean_tokens)
        if step.extends:
            rest_ms = self._step.at(step.new_tokens + step.sequences)
        else:
            rest_ms = self._decode_step.at(step.sequences)
        return self.calibration.factor * (rest_ms + attention_ms) + self.calibration.step_ms

    def _attention_ms(self, extends: Sequence[Extend]) -> float:
        return sum(self._extend.at(one.new_tokens, one.cached_tokens) for one in extends)

    def covers(self, step: Step) -> bool:
        """Whether no table has to be continued beyond its range for a step."""
        tokens_fit = not step.extends or self._step.axis.covers(step.new_tokens + step.sequences)
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


def known() -> list[str]:
    """Return the names of the profiles that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


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


def find(model: str, gpu: str, tensor_parallel: int) -> str:
    """Return the name of the profile of a model on a GPU.

    Raises:
        ConfigError: there is none.
    """
    files = [read_file(FOLDER / f"{name}.json") for name in known()]
    for file in files:
        if (file.model, file.gpu, file.tensor_parallel) == (model, gpu, tensor_parallel):
            return file.name
    listed = ", ".join(f"{file.model} on {file.gpu} TP{file.tensor_parallel}" for file in files)
    raise ConfigError(f"no profile of {model} on {gpu} TP{tensor_parallel}; there are {listed}")


def read_file(path: Path) -> ProfileFile:
    """Read the file of a profile.

    Raises:
        ConfigError: it cannot be read, or is of another format.
    """
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format")
        if version is None or msgspec.json.decode(version) != FORMAT:
            found = None if version is None else msgspec.json.decode(version)
            raise ConfigError(f"{path}: format {found}, this version reads format {FORMAT}")
        return msgspec.json.decode(data, type=ProfileFile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a profile: {error}") from error
