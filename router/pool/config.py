"""The pool's options: one file and a few flags, checked before anything starts."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

import msgspec

from ppd.ann.control import Aims
from ppd.ann.engine import MAX_ITOPK, StepShape
from ppd.ann.schedule import MAX_RESERVED, Bounds, Controls
from ppd.errors import ConfigError

_CPU_STEP = StepShape()
_CUDA_STEP = StepShape(slots=1024, expansions=16 * 1024, each=64)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


DEFAULT_SENTENCE_MODEL = Path("~/.cache/sglang-ppd/all-minilm-l6-v2")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    data: the folder with the collections, each a folder made by ``ppd-pool build``.
    shards: other pools to ask instead: each a list of replicas' URLs. Then ``data`` is not used.
    device: what searches run on; "cuda" needs PyTorch.
    threads: of searching, and of building an index anew; 0: one for each core.
    step: what one step holds; None: 8 slots and 768 expansions, on a card 1,024 and 16,384.
    bounds: searches that may wait.
    single_queue: every search waits in the order it came, whatever it is for: to compare with.
    controls: the scheduler's, to begin with.
    aims: of the control loop, which moves them with ``POST /v1/feedback``.
    control_interval_s: the loop takes a step so often, whoever sends feedback.
    default_itopk: nodes a search keeps while it looks, if it does not say.
    default_timeout_ms: of a search that has none.
    embeddings_url: OpenAI-compatible, for queries that are text; "": ``sentence_model``'s.
    sentence_model: a folder for all-MiniLM-L6-v2 (384 dimensions), which is fetched there if it is
        not there yet, and loaded at the start; None: ``DEFAULT_SENTENCE_MODEL``, with the first
        text; "": without ``embeddings_url`` no text is taken.
    rebuild_share: rows added and deleted since an index was built, as a share of those in it, that
        have it built anew (4,096 at least); 0: only when asked to.
    shard_slack_s: beyond a search's own time, in which a shard must answer, or the answer goes
        without it.
    """

    data: str = ""
    shards: tuple[tuple[str, ...], ...] = ()
    host: str = "127.0.0.1"
    port: int = 8100
    device: Device = Device.CPU
    threads: int = 0
    step: StepShape | None = None
    bounds: Bounds = Bounds()
    single_queue: bool = False
    controls: Controls = Controls()
    aims: Aims = Aims()
    control_interval_s: float = 0.25
    default_itopk: int = 64
    default_timeout_ms: float = 1000.0
    max_body_bytes: int = 64 * 1024 * 1024
    embeddings_url: str = ""
    embeddings_model: str = "default"
    embeddings_timeout_s: float = 5.0
    sentence_model: str | None = None
    rebuild_share: float = 0.5
    shard_slack_s: float = 0.5

    @property
    def cores(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def engines(self) -> int:
        """One for each core, or one for the card."""
        return self.cores if self.device is Device.CPU else 1

    @property
    def step_shape(self) -> StepShape:
        return self.step or (_CPU_STEP if self.device is Device.CPU else _CUDA_STEP)

    def check(self) -> None:
        """Raises:
        ConfigError: listing everything that is wrong.
        """
        wrong: list[str] = []
        if bool(self.data) == bool(self.shards):
            wrong.append("either a data folder or shards are needed")
        elif self.data and not Path(self.data).is_dir():
            wrong.append(f"data: {self.data} is no folder")
        if self.embeddings_url and self.sentence_model:
            wrong.append("one of embeddings_url and sentence_model embeds, not both")
        if any(not replicas for replicas in self.shards):
            wrong.append("every shard needs a URL")
        if not self.rebuild_share >= 0:
            wrong.append(f"rebuild_share must be 0 or more, got {self.rebuild_share}")
        if not 0 <= self.port <= 65535:
            wrong.append(f"port must be 0..65535, got {self.port}")
        if self.threads < 0:
            wrong.append(f"threads must be 0 or more, got {self.threads}")
        if not 1 <= self.default_itopk <= MAX_ITOPK:
            wrong.append(f"default_itopk must be 1..{MAX_ITOPK}, got {self.default_itopk}")
        if not 0 <= self.controls.reserved <= MAX_RESERVED:
            wrong.append(f"controls.reserved must be 0..{MAX_RESERVED}")
        positive = {
            "step.slots": self.step_shape.slots,
            "step.expansions": self.step_shape.expansions,
            "step.each": self.step_shape.each,
            "bounds.prefill": self.bounds.prefill,
            "bounds.decode": self.bounds.decode,
            "control_interval_s": self.control_interval_s,
            "default_timeout_ms": self.default_timeout_ms,
            "max_body_bytes": self.max_body_bytes,
            "embeddings_timeout_s": self.embeddings_timeout_s,
            "shard_slack_s": self.shard_slack_s,
        }
        for name, value in positive.items():
            if not value > 0:
                wrong.append(f"{name} must be above 0, got {value}")
        if wrong:
            raise ConfigError("; ".join(wrong))


def read_config(path: str) -> PoolConfig:
    """A TOML file with the fields of ``PoolConfig``.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=PoolConfig)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
