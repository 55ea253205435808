"""Workers that decode speculatively."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.draft_model import DraftSpec, draft_flags, ensure_pair
from ppd.contract import Role

from .workers import Workers, wait_ready, worker_launcher


def start_speculating(
    spec: DraftSpec, logs: Path, page_size: int, decode_flags: Sequence[str] = ()
) -> Iterator[Workers]:
    """Start prefill, decode and monolithic servers of a target with a draft; stop them at close."""
    target, draft = ensure_pair(spec)
    flags = ("--page-size", str(page_size), *draft_flags(draft, spec.algorithm))
    with worker_launcher(logs) as launcher:
        prefill = launcher.worker(Role.PREFILL, target, *flags)
        decode = launcher.worker(Role.DECODE, target, *flags, *decode_flags)
        monolithic = launcher.worker(Role.REPLICA, target, *flags)
        wait_ready(*launcher.started)
        yield Workers(prefill, decode, monolithic, page_size, target)
