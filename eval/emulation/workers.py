"""Emulated workers: started as ``ppd-worker`` starts workers on GPUs, with a small model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ppd.contract import Role
from ppd.errors import ConfigError
from sglang_patches.worker import plan_launch

from .. import tiny_model
from ..cluster import Launcher, Process, free_port
from ..draft_model import DraftSpec, draft_flags, ensure_pair
from ..profiles.profile import Profile
from .collective import Collective
from .drafts import Drafts
from .knobs import Knobs, SharedKnobs
from .model import MODEL, RANKED_MODEL
from .settings import ENVIRONMENT, Settings

PREFILL_CHUNK = 8192  # SGLang's own on a GPU of 80 GB
APPEND_CHUNK = 2048  # the plugin's own on a GPU
_MAX_RUNNING = 256
# SGLang gives a request up whose KV has not come for 300 s; in slow motion that is soon.
_PATIENT = dict.fromkeys(
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), "36000"
)
_NO_OVERLAP = "--disable-overlap-schedule"  # a CPU's prefill worker has it, a GPU's has not


@dataclass(slots=True)
class Emulated:
    """The workers of one emulated cluster.

    Attributes:
        folder: of settings, knobs and traces.
        drafts: of speculative decoding; None: there is none.
        draft: the folder of the draft's model.
    """

    launch: Launcher
    profile: Profile
    profile_name: str
    folder: Path
    model: Path
    knobs: SharedKnobs
    drafts: Drafts | None = None
    draft: Path | None = None
    workers: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str, role: Role, *flags: str, ranks: int = 1) -> Process:
        """Start a worker, which is not ready yet.

        Args:
            name: of the worker, and of its end of the link.
            flags: of SGLang, or ``NAME=VALUE`` of the plugin's variables.
            ranks: of DP attention; the cluster's model must have it.
        """
        settings = Settings(
            worker=name,
            profile=self.profile_name,
            calibration=self.profile.calibration.name,
            knobs=str(self.folder / "knobs"),
            trace=str(self.traces),
            drafts=self.drafts,
            ranks=ranks,
        )
        path = self.folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(settings))
        own = {
            ENVIRONMENT: str(path),
            # As ppd-worker has it on a GPU: see sglang_patches/worker.py.
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
            **_PATIENT,
        }
        port = free_port()
        passed = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        if role is Role.PREFILL:
            passed += ["--disaggregation-bootstrap-port", str(free_port())]
        chunk = APPEND_CHUNK if role is Role.DECODE else PREFILL_CHUNK
        if ranks > 1:
            passed += ["--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"]
            Collective.create(settings.steps_file, ranks)
            cores = sorted(os.sched_getaffinity(0))
            bound = (str(cores[rank % len(cores)]) for rank in range(ranks))
            # Else SGLang needs a NUMA node for each rank.
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        # SGLang divides it among the ranks.
        passed += ["--chunked-prefill-size", str(chunk * ranks)]
        passed += ["--max-total-tokens", str(self.profile.kv_pool_tokens)]
        passed += ["--max-running-requests", str(_MAX_RUNNING), "--random-seed", "0"]
        if self.drafts is not None and self.draft is not None:
            passed += draft_flags(self.draft, "EAGLE", len(self.drafts.accept_rates))
        variables = [flag for flag in flags if not flag.startswith("--") and "=" in flag]
        passed += [flag for flag in flags if flag not in variables]
        plan = plan_launch(
            role,
            passed,
            cpu=True,
            environment={},
            cpu_threads=1,
            options=dict(flag.split("=", 1) for flag in variables),
        )
        argv = [part for part in plan.argv if part != _NO_OVERLAP or part in flags]
        argv[argv.index("-m") + 1] = f"{__package__}.launch"
        assert argv[0] == sys.executable
        before = self.launch.environment
        self.launch.environment = {**before, **plan.environment, **own}
        try:
            process = self.launch.start(name, port, argv)
        finally:
            self.launch.environment = before
        self.workers[name] = process
        return process

    @property
    def traces(self) -> Path:
        """The folder of step traces."""
        return self.folder / "traces"

    def of(self, kind: str) -> Sequence[Process]:
        """Return the workers whose names begin so."""
        return [worker for name, worker in self.workers.items() if name.startswith(kind)]


@contextmanager
def emulated(
    launch: Launcher,
    profile: Profile,
    name: str,
    folder: Path,
    drafts: Drafts | None = None,
    *,
    ranks: bool = False,
) -> Iterator[Emulated]:
    """Give an emulated cluster without workers; ``launch`` stops them.

    Args:
        ranks: whether some of them have ranks.

    Raises:
        ConfigError: ranks and drafts were asked for together.
    """
    if ranks and drafts is not None:
        raise ConfigError("ranks do not speculate: the plugin refuses DP attention with drafts")
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for old in (folder / "traces").glob("*.jsonl"):
        old.unlink()
    knobs = SharedKnobs.create(folder / "knobs", Knobs())
    try:
        if drafts is None:
            model = tiny_model.ensure(RANKED_MODEL if ranks else MODEL)
            yield Emulated(launch, profile, name, folder, model, knobs)
        else:
            model, draft = ensure_pair(DraftSpec(MODEL))
            yield Emulated(launch, profile, name, folder, model, knobs, drafts, draft)
    finally:
        knobs.close()
