"""Our router as a compiled wheel has it, unpacked to be measured beside the rivals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

_SOURCES = ("setup.py", "build_backend.py", "pyproject.toml", "ppd", "router")


def install(where: Path, checkout: Path) -> Path:
    """Build the wheel of a checkout, and unpack it; nothing is done if its sources are the same.

    Args:
        where: folder of the build; older builds in it are deleted.
        checkout: folder of the project's sources. Nothing is written into it.

    Returns:
        A folder with the wheel's files.

    Raises:
        subprocess.CalledProcessError: it cannot be built here, for want of a compiler.
    """
    site = where / _digest(checkout)
    if not site.exists():
        print("compiling our router: minutes", file=sys.stderr, flush=True)
        shutil.rmtree(where, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            # A copy: a build leaves its intermediate files in the source folder.
            source = Path(folder) / "source"
            ignored = shutil.ignore_patterns(".*", "build", "dist", "results", "__pycache__")
            shutil.copytree(checkout, source, ignore=ignored)
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
                    *("--no-build-isolation", "--wheel-dir", folder, str(source)),
                ],
                env={**os.environ, "PPD_COMPILE": "1"},
                stdout=sys.stderr,
                check=True,
            )
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    return site


def _digest(checkout: Path) -> str:
    digest = sha256()
    for name in _SOURCES:
        path = checkout / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
