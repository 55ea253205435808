"""Makes profiles from aiconfigurator's measured operator latencies; not needed to use them.

The tables are sampled from the package. Then they are compared with the package's own answers for
whole steps, at random shapes in their range. The result is written into the profile.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ppd.errors import ConfigError
from ppd.extras import install

from .files import FORMAT, Calibration, Interpolation, ProfileFile, Source, Tables, write_file
from .profile import Extend, Profile, Step
from .recipes import Recipe

PACKAGE = "aiconfigurator-core"
VERSION = "0.12.0"
_BACKEND = "sglang"
_MEMORY_SHARE = 0.85  # of the GPU, weights and KV together
_STEP_BOUND = {"max_num_tokens": 8192, "max_batch_size": 256}  # for its estimate of activations
_LINKS_GBPS = (25.0, 100.0, 400.0)
_CHECKED_STEPS = 400
_SEED = 0
_DEVICE = Calibration("device", 1.0, 0.0, "device time alone, as the package gives it")
_CONTEXT = (1, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
_LONG = (49152, 65536, 98304, 131072)
_NEW = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768),
    *(
        896,
        1024,
        1056,
        1280,
        1536,
        1792,
        2048,
        2560,
        3072,
        3584,
        4096,
        5120,
        6144,
        7168,
        8192,
        10240,
    ),
    *(12288, 16384),
)
_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def make(recipe: Recipe, out: Path) -> ProfileFile:
    """Make a profile and write it.

    Raises:
        ConfigError: the package is missing or of another version, or has no such model or GPU; or
            the file cannot be written.
    """
    database = _Database(recipe)
    tables = _tables(database)
    kv_bytes, pool_tokens = database.memory()
    file = ProfileFile(
        format=FORMAT,
        name=recipe.name,
        model=recipe.title,
        gpu=recipe.gpu,
        tensor_parallel=recipe.tensor_parallel,
        kv_bytes_per_token=kv_bytes,
        kv_pool_tokens=pool_tokens,
        kv_pool=(
            f"{_MEMORY_SHARE:.0%} of the memory of each GPU, less weights and the package's "
            f"estimate of activations ({_STEP_BOUND['max_num_tokens']} tokens a step)"
        ),
        links_gbps=_LINKS_GBPS,
        source=database.source(),
        interpolation=Interpolation("", 0, 0, 0.0, 0.0, 0.0, ""),
        calibrations=(_DEVICE,),
        tables=tables,
    )
    file = msgspec.structs.replace(file, interpolation=_compare(file, database))
    write_file(out, file)
    return file


class _Database:
    """The package, for one model on one GPU."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        try:
            found = metadata.version(PACKAGE)
            from aiconfigurator_core.sdk.engine import EngineHandle
        except (metadata.PackageNotFoundError, ImportError) as error:
            raise ConfigError(f"{PACKAGE} is not installed here: {install('profiles')}") from error
        if found != VERSION:
            raise ConfigError(f"{PACKAGE} {found} is installed; profiles are made with {VERSION}")
        self._parallel = {"tp_size": recipe.tensor_parallel, **recipe.options}
        try:
            self._engine: Any = EngineHandle.compile(
                recipe.model, recipe.system, _BACKEND, **self._parallel
            )
        except Exception as error:  # it has many; the message names model or system
            raise ConfigError(
                f"{PACKAGE} has no {recipe.model} on {recipe.system}: {error}"
            ) from error

    def source(self) -> Source:
        """Return where the numbers come from."""
        return Source(
            package=PACKAGE,
            version=VERSION,
            license="Apache-2.0",
            attribution="Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
            url="https://github.com/ai-dynamo/aiconfigurator",
            model=self._recipe.model,
            system=self._recipe.system,
            backend=_BACKEND,
            backend_version=_backend_version(self._recipe.system),
            options=self._recipe.options,
        )

    def memory(self) -> tuple[int, int]:
        """Return bytes of KV a token, of all GPUs of a worker, and the tokens that fit."""
        from aiconfigurator_core.sdk.memory import estimate_kv_cache

        found = estimate_kv_cache(
            self._recipe.model,
            self._recipe.system,
            _BACKEND,
            backend_version="current",
            memory_fraction_kind="of_total",
            memory_fraction_value=_MEMORY_SHARE,
            **_STEP_BOUND,
            **self._parallel,
        )
        on_each = int(found["kv_size_per_token_bytes"])
        # Each GPU of a worker holds the same latent KV of MLA, and its own heads of all others.
        copies = 1 if "DeepSeek" in self._recipe.model else self._recipe.tensor_parallel
        return on_each * copies, int(found["total_kv_size_tokens"])

    def extend(self, new: int, cached: int) -> tuple[float, float]:
        """Return the milliseconds of a prefill step: attention, and the rest."""
        parts, _ = self._engine.run_static_per_op(
            batch_size=1, isl=new + cached, osl=2, prefix=cached
        )
        return _split(parts)

    def decode(self, sequences: int, context: int) -> tuple[float, float]:
        """Return the milliseconds of a decode step: attention, and the rest."""
        return _split(self._engine.decode_step_per_op(sequences, context, 2))

    def whole_extend(self, new: int, cached: int) -> float:
        """Return the package's own answer for a prefill step."""
        return float(self._engine.predict_prefill_latency(1, new + cached, cached))

    def whole_decode(self, sequences: int, context: int) -> float:
        """Return the package's own answer for a decode step."""
        return float(self._engine.decode_step_latency(sequences, context, 2))


def _split(parts: Iterable[tuple[str, float, float, str]]) -> tuple[float, float]:
    attention = rest = 0.0
    for name, ms, *_ in parts:
        if name.endswith(("_attention", "_mla_block")):
            attention += ms
        else:
            rest += ms
    return attention, rest


def _backend_version(system: str) -> str:
    from aiconfigurator_core.sdk.perf_database import resolve_query_version

    return str(resolve_query_version(system, _BACKEND, "current"))


def _tables(database: _Database) -> Tables:
    contexts = (*_CONTEXT, *_LONG)
    cached = (0, *contexts[1:])
    tokens = (*_NEW, 24576, 32768)
    decodes = [[database.decode(batch, context) for context in contexts] for batch in _SEQUENCES]
    return Tables(
        step_tokens=tokens,
        step_ms=_rounded(database.extend(new, 0)[1] for new in tokens),
        new_tokens=tokens,
        cached_tokens=cached,
        extend_ms=tuple(
            _rounded(database.extend(new, before)[0] for before in cached) for new in tokens
        ),
        sequences=_SEQUENCES,
        decode_step_ms=_rounded(row[0][1] for row in decodes),
        context_tokens=contexts,
        decode_ms=tuple(_rounded(attention for attention, _ in row) for row in decodes),
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def _compare(file: ProfileFile, database: _Database) -> Interpolation:
    """Compare the tables with the package's own answers for whole steps."""
    profile = Profile(file, _DEVICE)
    errors: list[tuple[float, str]] = []
    for step, shape, answer in _random_steps(random.Random(_SEED), database):
        ms = answer()
        errors.append((abs(profile.step_ms(step) / ms - 1), shape))
    errors.sort()
    only = [error for error, _ in errors]
    return Interpolation(
        method=(
            "linear between the points of a table; compared with the package's latency of whole "
            "steps at shapes drawn log-uniformly from the range"
        ),
        steps=len(errors),
        seed=_SEED,
        median_error=round(statistics.median(only), 5),
        p99_error=round(only[int(0.99 * len(only))], 5),
        max_error=round(only[-1], 5),
        worst=errors[-1][1],
    )


def _random_steps(
    source: random.Random, database: _Database
) -> Iterator[tuple[Step, str, Callable[[], float]]]:
    def drawn(most: int) -> int:
        return int(most ** source.random())

    for _ in range(_CHECKED_STEPS // 2):
        new, cached = drawn(32768), drawn(131072)
        yield (
            Step((Extend(new, cached),)),
            f"{new} new after {cached}",
            partial(database.whole_extend, new, cached),
        )
        batch, context = drawn(256), drawn(131072)
        yield (
            Step((), batch, batch * context),
            f"{batch} decodes at {context}",
            partial(database.whole_decode, batch, context),
        )
