"""Load clients that others wrote, as processes: AIPerf's installation, one run to its end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppd.errors import PpdError

AIPERF = "aiperf==0.13.0"
_TIMEOUT_S = 900.0


class ClientError(PpdError):
    """A client failed, or saw errors."""


def aiperf_in(where: Path) -> Path:
    """Its command, in an environment that is made if it is not there."""
    command = where / "bin/aiperf"
    if not command.exists():
        print(f"first run: installing {AIPERF} into {where}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        subprocess.run([where / "bin/pip", "install", "--quiet", AIPERF], check=True)
    return command


def run_to_end(argv: Sequence[str], log: Path) -> None:
    """Raises:
    ClientError: it failed; the end of its log is told.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                argv, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            message = f"{argv[0]} did not end within {_TIMEOUT_S:g} s; see {log}"
            raise ClientError(message) from error
    if done.returncode != 0:
        told = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
        end = "\n  ".join(told.splitlines()[-15:])
        raise ClientError(f"{argv[0]} ended with {done.returncode}; the end of {log}:\n  {end}")
