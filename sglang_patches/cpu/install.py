"""Installs the CPU engine into the environment of the Python that runs this file.

    python sglang_patches/cpu/install.py [VERSION]

VERSION is that of SGLang; without it, the newest one that the plugin supports is installed. Each
version needs an environment of its own, because two versions pin different packages.

An extra cannot do it: SGLang's own requirements are CUDA packages. So SGLang is installed without
them, and the packages that a CPU server imports are installed by name. The file uses the standard
library only. A second run finds its stamp and does nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")  # common.txt, and a file for each version
DEFAULT = "0.5.23"
# On PyPI this is the CUDA build (several GB, works too); point pip at PyTorch's index of CPU
# wheels (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) for the small one.
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"  # goes with that torch; imported by transformers, never used
# Mooncake's engine links against these: Debian package -> library.
LIBRARIES = {
    "libibverbs1": "libibverbs.so.1",
    "librdmacm1": "librdmacm.so.1",
    "libnuma1": "libnuma.so.1",
}


def main() -> None:
    """Install the missing system libraries, then the packages; the stamp records success."""
    version = sys.argv[1] if len(sys.argv) > 1 else DEFAULT
    supported = sorted(path.stem for path in REQUIREMENTS.glob("[0-9]*.txt"))
    if version not in supported:
        sys.exit(f"SGLang {version} is not supported; supported: {', '.join(supported)}")
    _install_libraries()
    sglang, pins = f"sglang=={version}", REQUIREMENTS / f"{version}.txt"
    files = [pins.read_text(), (REQUIREMENTS / "common.txt").read_text()]
    digest = hashlib.sha256("\n".join([sglang, TORCH, TORCHVISION, *files]).encode()).hexdigest()
    stamp = Path(sys.prefix) / "ppd-cpu-engine"
    if stamp.exists() and stamp.read_text() == digest:
        return
    _pip(TORCH)
    _pip("-r", str(pins))
    _pip("--no-deps", sglang, TORCHVISION)
    stamp.write_text(digest)


def _install_libraries() -> None:
    missing = [package for package, library in LIBRARIES.items() if not _loads(library)]
    if not missing:
        return
    if os.geteuid() != 0:
        sys.exit(
            f"Mooncake needs {', '.join(missing)}. Type:\n"
            f"  sudo apt-get install {' '.join(missing)}"
        )
    print(f"installing {', '.join(missing)} for Mooncake", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "install", "-y", "-qq", *missing], check=True, env=environment)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _pip(*arguments: str) -> None:
    print(f"pip install {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"could not install {' '.join(arguments)}; pip's message stands above")


if __name__ == "__main__":
    main()
