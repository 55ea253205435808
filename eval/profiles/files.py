"""The files of profiles: what is in them, and how they are read, written and found.

Unknown fields are refused, and so is a file of another format.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ppd.errors import ConfigError

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


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine takes beside its steps; measured or fitted, so a device's profile has none.

    Attributes:
        request_ms: of each request, once.
        handover_ms: of each remote turn, beside its transfer.
        overlap: a step is launched while the one before it runs.
    """

    request_ms: float = 0.0
    handover_ms: float = 0.0
    overlap: bool = True


class ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a profile.

    Attributes:
        host: used by the simulator; an emulation has a host of its own.
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
    host: Host = Host()


def known() -> list[str]:
    """Return the names of the profiles that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


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


def write_file(path: Path, file: ProfileFile) -> None:
    """Write the file of a profile.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_bytes(_encode(file))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _encode(file: ProfileFile) -> bytes:
    """Return the JSON of a profile, a table's row on a line."""
    text = msgspec.json.format(msgspec.json.encode(file), indent=1).decode()
    lines: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        is_value = bare.rstrip(",").replace(".", "").replace("e-", "").isdigit() or bare in (
            "]",
            "],",
        )
        if lines and is_value and not lines[-1].endswith(("]", "],")):
            joint = "" if lines[-1].endswith("[") or bare[0] == "]" else " "
            lines[-1] += joint + bare
        else:
            lines.append(line)
    return ("\n".join(lines) + "\n").encode()
