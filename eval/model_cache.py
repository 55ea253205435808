"""The folder of models in the user's cache, in which each model appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the models' folder in the user's cache (``XDG_CACHE_HOME``)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sglang-ppd" / "models"


def build_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return ``target``, a folder that ``write`` fills if it is not there yet.

    Safe against a second process that builds the same folder: ``write`` gets a scratch folder,
    which is renamed when it is complete.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
