"""The rows that are searched, and the pool's own index of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ppd.ann.lanes import Target
from ppd.ann.snapshot import Precision, Shape, Snapshot, build
from ppd.ann.space import Metric, Rows

from . import minilm, sentences


@dataclass(frozen=True, slots=True)
class Sample:
    """Sentences to embed.

    Attributes:
        files: their sources; what they lack comes from Python docstrings.
        count: how many to draw from, besides the queries.
        shortest: how many of these, the shortest, are embedded; None: all.
        queries: how many of the embedded ones are queries.
        cache: folder of the model and of embeddings.
    """

    files: tuple[Path, ...]
    count: int
    shortest: int | None
    queries: int
    seed: int
    cache: Path

    def embedded(self) -> tuple[Rows, Rows, dict[str, object]]:
        """Return rows, queries, and fields that describe them.

        Raises:
            ConfigError: a file cannot be read, or the model cannot be fetched.
        """
        texts, documented = sentences.collect(self.files, self.count + self.queries, self.seed)
        if self.shortest is not None:
            by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
            texts = [texts[i] for i in sorted(by_length[: self.shortest])]
        print_progress(
            f"embedding {len(texts)} sentences; {documented} of those drawn are from docstrings"
        )
        rows, queries = split(minilm.embed(texts, self.cache), self.queries)
        return rows, queries, {"drawn": self.count, "from_docstrings": documented}


def split(rows: Rows, queries: int) -> tuple[Rows, Rows]:
    """Divide rows into those that are searched, and queries."""
    return np.ascontiguousarray(rows[:-queries]), np.ascontiguousarray(rows[-queries:])


class Given:
    """What every index is made of, and the pool's own graph, which several are made of.

    Attributes:
        rows: compared by squared distance.
    """

    def __init__(self, rows: Rows, threads: int) -> None:
        self.rows = rows
        self.threads = threads

    @cached_property
    def snapshot(self) -> Snapshot:
        """The collection that ``ppd-pool build`` makes by default."""
        return build(
            self.rows,
            np.arange(self.rows.shape[0], dtype=np.int64),
            Metric.L2,
            Precision.INT8,
            Shape(),
            threads=self.threads,
            seed=0,
        )

    @property
    def target(self) -> Target:
        """Return what our engine searches."""
        return Target(self.snapshot, np.zeros(self.rows.shape[0], np.uint8))


def print_progress(text: str) -> None:
    """Print a line to stderr; the last line of stdout is a result."""
    print(text, file=sys.stderr, flush=True)
