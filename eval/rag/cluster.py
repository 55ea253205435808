"""A pool with the project's own docs, and the cluster around it, as processes.

It makes passages and their collection, and starts all processes. It sends no requests.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.contract import Role
from ppd.errors import ConfigError

from ..cluster import Launcher, Process, free_port, script, share_flags, wait_all
from ..pool import minilm
from ..real_model import ServedModel

COLLECTION = "docs"
_LEAST, _MOST = 80, 420  # characters of a passage
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@dataclass(frozen=True, slots=True)
class Passage:
    """One paragraph.

    Attributes:
        id: its file, and its number in the file.
    """

    id: str
    text: str


def passages(folder: Path) -> list[Passage]:
    """Return the paragraphs of all Markdown below ``folder``, without tables and code.

    Raises:
        ConfigError: there is none.
    """
    found = [passage for path in sorted(folder.rglob("*.md")) for passage in _passages_of(path)]
    if not found:
        raise ConfigError(f"{folder}: no Markdown with passages of {_LEAST} characters or more")
    return found


def _passages_of(path: Path) -> Iterator[Passage]:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    number = 0
    for part in re.split(r"\n\s*\n|\n(?=- \*\*)", text):
        if part.lstrip().startswith(("|", "#", "!", "<")):
            continue
        plain = " ".join(_LINK.sub(r"\1", part).split())
        if len(plain) >= _LEAST:
            number += 1
            yield Passage(f"{path.name}:{number}", plain[:_MOST])


def build_collection(found: Sequence[Passage], data: Path, cache: Path) -> None:
    """Build ``data``/docs anew by ``ppd-pool build``.

    Raises:
        ConfigError: the model cannot be fetched, or the build fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = minilm.embed([passage.text for passage in found], cache)
    data.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "id": [passage.id for passage in found],
            "text": [passage.text for passage in found],
            "vector": list(rows),
        }
    )
    file = data / f"{COLLECTION}.parquet"
    pq.write_table(table, file)
    collection = data / "collections" / COLLECTION
    collection.parent.mkdir(exist_ok=True)
    if collection.exists():
        for old in collection.iterdir():
            old.unlink()
        collection.rmdir()
    argv = [script("ppd-pool"), "build", str(file), str(collection)]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ConfigError(f"ppd-pool build failed: {made.stderr.strip()[-500:]}")


@dataclass(frozen=True, slots=True)
class RagCluster:
    """The processes of a cluster whose router asks a pool."""

    prefill: Process
    decode: Process
    pool: Process
    router: Process

    @property
    def workers(self) -> list[str]:
        """The URLs of the workers."""
        return [self.prefill.url, self.decode.url]


def start(launch: Launcher, model: ServedModel, data: Path, cache: Path, policy: str) -> RagCluster:
    """Start all processes, and wait for them; workers and pool share the cores.

    Raises:
        ClusterError: something did not start.
    """
    pool_port, router_port = free_port(), free_port()
    settings = data / f"pool-{pool_port}.toml"
    settings.write_text(
        f'data = "{data / "collections"}"\nport = {pool_port}\nsentence_model = "{cache}"\n'
    )
    pool_argv = [script("ppd-pool"), "serve", "--config", str(settings)]
    pool = launch.start("pool", pool_port, pool_argv)
    flags = model.worker_flags
    prefill = launch.worker(Role.PREFILL, model.path, *flags, *share_flags(0, 2))
    decode = launch.worker(Role.DECODE, model.path, *flags, *share_flags(1, 2))
    wait_all([prefill, decode, pool])
    # Long time limits: on CPU a search shares its cores with two workers.
    options = data / f"router-{router_port}.toml"
    options.write_text(f'[retrieval]\nurl = "{pool.url}"\nttft_budget_ms = 5e3\nmax_ms = 5e3\n')
    router_flags = ["--policy", policy, "--config", str(options)]
    router = launch.router([prefill], [decode], *router_flags, port=router_port)
    wait_all([router])
    return RagCluster(prefill, decode, pool, router)
