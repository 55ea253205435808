"""The machine of a worker, and the one that a table was measured on.

A table's times hold for one model on one GPU with one link. The names of GPUs come from drivers,
catalogues and profiles, which spell them differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

# Makers, and what does not change a GPU's speed much: socket and size of memory.
_IGNORED = re.compile(r"NVIDIA|AMD|INSTINCT|TESLA|SXM\d*|\d+GB|HBM\d*E?|OAM")
_SEPARATORS = re.compile(r"[\s_-]+")
# A link may differ by so much from a table's: what is announced is its raw rate.
_LINK_TOLERANCE = 1.5


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one worker runs on.

    Attributes:
        gpu: the GPU's name, by any maker's or catalogue's spelling; "": unknown, or none.
        tensor_parallel: GPUs that a worker spreads each layer over.
        link_gbps: gigabits a second of a worker's link to the others; None: unknown.
        ranks: of data parallelism.
    """

    gpu: str
    tensor_parallel: int = 1
    link_gbps: float | None = None
    ranks: int = 1

    def __str__(self) -> str:
        link = "" if self.link_gbps is None else f", {self.link_gbps:g} Gb/s"
        ranks = "" if self.ranks == 1 else f", {self.ranks} ranks"
        return f"{self.gpu or 'unknown GPU'} TP {self.tensor_parallel}{ranks}{link}"

    def problems(self) -> Iterator[str]:
        """Iterate over everything that is wrong with the values."""
        if not gpu_name(self.gpu):
            yield f"machine.gpu must name a GPU, got {self.gpu!r}"
        for name in ("tensor_parallel", "ranks"):
            if getattr(self, name) < 1:
                yield f"machine.{name} must be at least 1, got {getattr(self, name)}"
        if self.link_gbps is not None and not 0 < self.link_gbps < float("inf"):
            yield f"machine.link_gbps must be above 0, got {self.link_gbps}"

    def fits(self, worker: Machine) -> bool:
        """Whether times of this machine hold for a worker's.

        A link that is unknown on either side is not compared.
        """
        return (
            self._has_link_of(worker)
            and gpu_name(self.gpu) == gpu_name(worker.gpu) != ""
            and self.tensor_parallel == worker.tensor_parallel
            and self.ranks == worker.ranks
        )

    def _has_link_of(self, worker: Machine) -> bool:
        one, other = self.link_gbps, worker.link_gbps
        if one is None or other is None:
            return True
        return max(one, other) <= _LINK_TOLERANCE * min(one, other)


def gpu_name(name: str) -> str:
    """The part of a GPU's name that all spell alike: ``H100`` of ``NVIDIA H100 80GB HBM3``.

    What stays beside it is another product: ``H100 PCIE``, ``H100 NVL``.
    """
    words = _SEPARATORS.split(name.upper())
    return " ".join(word for word in words if word and not _IGNORED.fullmatch(word))
