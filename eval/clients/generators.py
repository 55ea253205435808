"""Load generators: SGLang's own benchmark, and NVIDIA's AIPerf."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..cluster import environment, run_to_end
from .run import CONVERSATIONS, TURNS, ClientRun, require

AIPERF = "aiperf==0.13.0"
# SGLang's benchmark imports what a machine without GPU has stand-ins for.
_BENCHMARK = (
    "import runpy; from sglang_patches.cpu import stand_ins; import torch; "
    "torch.cuda.is_available() or stand_ins.install(); "
    "runpy.run_module('sglang.benchmark.serving', run_name='__main__')"
)


def by_sglang(run_of: ClientRun) -> int:
    """Run SGLang's benchmark: groups that share a system prompt, conversations of several turns."""
    rows = run_of.folder / "sglang-benchmark.jsonl"
    rows.unlink(missing_ok=True)
    groups, each = 2, 4
    run_to_end(
        [
            *(sys.executable, "-c", _BENCHMARK, "--backend", "sglang-oai-chat"),
            *("--base-url", run_of.url, "--model", run_of.model),
            *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(groups)),
            *("--gsp-prompts-per-group", str(each), "--gsp-num-turns", str(TURNS)),
            *("--gsp-system-prompt-len", "128", "--gsp-question-len", "32"),
            *("--gsp-output-len", "16", "--max-concurrency", "4", "--disable-tqdm"),
            *("--output-file", str(rows), "--cache-report"),
        ],
        run_of.folder / "sglang-benchmark.log",
    )
    result = json.loads(rows.read_text().splitlines()[-1])
    completed = int(result["completed"])
    require(completed == groups * each * TURNS, f"it completed {completed} requests")
    return completed


def by_aiperf(run_of: ClientRun) -> int:
    """Run AIPerf: synthetic conversations with live replies."""
    command = aiperf_in(run_of.environments / "aiperf")
    artifacts = run_of.folder / "aiperf"
    log = run_of.folder / "aiperf.log"
    run_to_end(
        [
            *(str(command), "profile", "--model", "default", "--tokenizer", run_of.model),
            *("--url", run_of.url, "--endpoint-type", "chat", "--streaming"),
            *("--conversation-num", str(CONVERSATIONS)),
            *("--conversation-turn-mean", str(TURNS), "--conversation-turn-stddev", "0"),
            *("--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", "16"),
            *("--concurrency", "4", "--random-seed", "1", "--ui", "none"),
            # A random model may end at once, and an empty reply is an error to AIPerf.
            *("--extra-inputs", "ignore_eos:true"),
            *("--no-gpu-telemetry", "--artifact-dir", str(artifacts)),
        ],
        log,
    )
    found = sorted(artifacts.rglob("profile_export_aiperf.json"))
    require(bool(found), f"it wrote no result; see {log}")
    result = json.loads(found[-1].read_text())
    counted = result["request_count"]
    requests = int(counted["avg"] if isinstance(counted, dict) else counted)
    errors = result.get("error_summary") or []
    require(not errors, f"it saw errors: {errors}")
    return requests


def aiperf_in(folder: Path) -> Path:
    """Install AIPerf into an environment, unless it is there, and return its command."""
    return environment(folder, [AIPERF]) / "aiperf"
