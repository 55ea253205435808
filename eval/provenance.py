"""Where a measurement comes from: the fields that every raw row carries."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def provenance(seed: int) -> dict[str, object]:
    """Return commit, hardware, versions, time and seed of a measurement made now.

    ``load_average`` is of the last minute, this process included. If it is more than a few
    processes to a core, something else was running, too.
    """
    return {
        "commit": commit_of(Path(__file__).parent),
        "hardware": _hardware(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


@functools.cache
def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that holds a folder, when this was first called.

    A commit that is made during a measurement is not what was measured, so all rows of a
    process have the same one.

    Returns:
        The environment variable ``PPD_COMMIT``, which names the commit of a copy without its
        history. Without it the checkout's commit, with ``+`` if it has changes; "unknown" outside
        a checkout.
    """
    if told := os.environ.get("PPD_COMMIT"):
        return told
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def _hardware() -> str:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}"
