"""The pool's options, which are checked together before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ppd.ann.control import Aims
from ppd.ann.engine import StepShape
from ppd.ann.schedule import MAX_RESERVED, Bounds, Controls
from ppd.ann.searches import MAX_ITOPK
from ppd.errors import ConfigError

from ..config.decoding import decode_fields, read_toml
from ..config.ranges import (
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    PositiveInt,
    range_problem,
    range_problems,
)

Itopk = Annotated[int, msgspec.Meta(ge=1, le=MAX_ITOPK, description=f"1..{MAX_ITOPK}")]
_Reserved = Annotated[float, msgspec.Meta(ge=0, le=MAX_RESERVED, description=f"0..{MAX_RESERVED}")]
_BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1, description="0 to below 1")]
_CPU_STEP = StepShape()
_CUDA_STEP = StepShape(slots=1024, expansions=16 * 1024, each=64)


class Device(StrEnum):
    """The device that searches run on."""

    CPU = "cpu"
    CUDA = "cuda"


DEFAULT_SENTENCE_MODEL = Path("~/.cache/sglang-ppd/all-minilm-l6-v2")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a vector-search pool.

    Attributes:
        data: folder of the collections, each a folder made by ``ppd-pool build``.
        shards: other pools that hold the rows instead: for each shard the URLs of its replicas.
            Then ``data`` is not used.
        host: address of the pool.
        port: port of the pool; 0 is any free port.
        device: the device that searches run on; ``cuda`` needs PyTorch.
        threads: number of threads that search, or that build an index; 0: one for each core.
        step: capacity of one step; None: 1 slot and 320 expansions, on a GPU 1,024 and 16,384.
        bounds: maximum number of waiting searches.
        single_queue: searches of both kinds wait in one queue, for comparisons.
        controls: initial settings of the scheduler.
        aims: targets of the control loop, which adjusts ``controls`` by ``POST /v1/feedback``.
        control_interval_s: interval of the control loop's steps.
        default_itopk: candidates that a search keeps, if the search sets no number.
        default_timeout_ms: timeout of a search that has none of its own.
        max_body_bytes: maximum size of a request's body.
        embeddings_url: OpenAI-compatible server that embeds queries that are text; "":
            ``sentence_model`` does.
        embeddings_model: the model that requests to ``embeddings_url`` name.
        embeddings_timeout_s: timeout of a request to ``embeddings_url``.
        sentence_model: folder of all-MiniLM-L6-v2 (384 dimensions), loaded at the start and
            downloaded if it is missing. None: ``DEFAULT_SENTENCE_MODEL``, loaded with the first
            text. "": without ``embeddings_url``, queries that are text are refused.
        rebuild_share: rows added and deleted since an index was built, as a share of its rows,
            that start a rebuild (4,096 rows at least); 0: only a request does.
        shard_slack_s: extra time, beyond a search's own, for a shard's response. A shard that
            is later is left out of the results. A router waits 50 ms beyond a search's own time.
    """

    data: str = ""
    shards: tuple[tuple[str, ...], ...] = ()
    host: str = "127.0.0.1"
    port: Port = 8100
    device: Device = Device.CPU
    threads: NonNegativeInt = 0
    step: StepShape | None = None
    bounds: Bounds = Bounds()
    single_queue: bool = False
    controls: Controls = Controls()
    aims: Aims = Aims()
    control_interval_s: Positive = 0.25
    default_itopk: Itopk = 64
    default_timeout_ms: Positive = 1000.0
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    embeddings_url: str = ""
    embeddings_model: str = "default"
    embeddings_timeout_s: Positive = 5.0
    sentence_model: str | None = None
    rebuild_share: NonNegative = 0.5
    shard_slack_s: Positive = 0.025

    @property
    def cores(self) -> int:
        """Number of threads that search."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def engines(self) -> int:
        """Number of engines: one for each core, or one for the GPU."""
        return self.cores if self.device is Device.CPU else 1

    @property
    def step_shape(self) -> StepShape:
        """Capacity of one step: ``step``, or the device's default."""
        return self.step or (_CPU_STEP if self.device is Device.CPU else _CUDA_STEP)

    def check(self) -> None:
        """Check all options together.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        if wrong := self.problems():
            raise ConfigError("; ".join(wrong))

    def problems(self) -> list[str]:
        """Return a message for each option that is wrong."""
        wrong: list[str] = []
        if bool(self.data) == bool(self.shards):
            wrong.append("either a data folder or shards are needed")
        elif self.data and not Path(self.data).is_dir():
            wrong.append(f"data: {self.data} is no folder")
        if self.embeddings_url and self.sentence_model:
            wrong.append("one of embeddings_url and sentence_model embeds, not both")
        if any(not replicas for replicas in self.shards):
            wrong.append("every shard needs a URL")
        wrong += range_problems(self)
        # ppd's own types, which have no ranges.
        nested: dict[str, tuple[float, Any]] = {
            "step.slots": (self.step_shape.slots, PositiveInt),
            "step.expansions": (self.step_shape.expansions, PositiveInt),
            "step.each": (self.step_shape.each, PositiveInt),
            "bounds.prefill": (self.bounds.prefill, PositiveInt),
            "bounds.decode": (self.bounds.decode, PositiveInt),
            "controls.reserved": (self.controls.reserved, _Reserved),
            "aims.decode_tokens": (self.aims.decode_tokens, Positive),
            "aims.decode_wait_p95_ms": (self.aims.decode_wait_p95_ms, Positive),
            "aims.kv_link_use": (self.aims.kv_link_use, _BelowOne),
            "aims.min_reserved": (self.aims.min_reserved, _Reserved),
            "aims.max_reserved": (self.aims.max_reserved, _Reserved),
        }
        for name, (value, kind) in nested.items():
            if problem := range_problem(name, value, kind):
                wrong.append(problem)
        return wrong


def read_config(path: str, flags: Mapping[str, Any]) -> PoolConfig:
    """Return the configuration of a TOML file and of the command line's flags.

    Args:
        path: of the TOML file.
        flags: fields that replace the file's.

    Raises:
        ConfigError: the file cannot be read, or has unknown, missing or wrongly typed fields.
            The message lists all of them.
    """
    wrong: list[str] = []
    fields = decode_fields(PoolConfig, read_toml(path), wrong)
    if wrong:
        raise ConfigError(f"{path}: {'; '.join(sorted(wrong))}")
    return msgspec.structs.replace(PoolConfig(**fields), **flags)
