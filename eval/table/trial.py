"""A trial of a new table: one conversation of each workload, through a router with real workers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from ppd.errors import WorkerError

from .. import tiny_model
from ..client import hold
from ..cluster import launching, wait_all
from ..endpoints import vocabulary_of
from ..samples import Sample
from ..sweep.clusters import router, start_workers
from ..sweep.config import Place, SweepConfig, plan


def run(
    config: SweepConfig, model: str | None, table: Path, summary: dict[str, Any], logs: Path
) -> None:
    """Print ``summary`` with the router's decisions, as one JSON line.

    Raises:
        WorkerError: a turn failed, or none was decided by the table.
    """
    path = tiny_model.resolve(model)
    with launching(logs) as launch:
        at = config.clusters[0] if config.clusters else start_workers(launch, config, path)[0]
        front = router(launch, at, "--table", str(table))
        wait_all([front])
        samples = asyncio.run(_talk(config, front.url, at.decode[0]))
    if failed := [sample.error for sample in samples if sample.error]:
        raise WorkerError(f"{len(failed)} turns failed with the new table: {failed[0]}")
    reasons = Counter(sample.reason for sample in samples if sample.turn > 1)
    if not reasons["table"]:
        raise WorkerError(f"{table}: no turn was decided by it, reasons were {dict(reasons)}")
    routes = Counter(sample.route for sample in samples if sample.turn > 1)
    print(json.dumps(summary | {"tried": {"reasons": dict(reasons), "routes": dict(routes)}}))


async def _talk(config: SweepConfig, router: str, decode: str) -> list[Sample]:
    """One after the other, at the lowest rate."""
    async with aiohttp.ClientSession() as http:
        vocabulary = await vocabulary_of(http, decode)
    samples = []
    for workload in config.workloads():
        conversations = plan(config, Place(workload, None), config.seeds[0])[:1]
        samples += await hold(
            router, conversations, seed=f"trial/{workload}", vocabulary=vocabulary
        )
    return samples
