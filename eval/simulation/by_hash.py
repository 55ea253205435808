"""The placement of the router with ``placement = "hash"``, for all roles of a simulated cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xxhash import xxh3_64_intdigest

from ppd.contract import Role
from ppd.placement import PlannedTurn, WorkerView, place

from .workers import Cluster


class ByHash:
    """A ``ppd.placement.Chooser`` by rendezvous hashing with bounded load, for all roles."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(
        self, role: Role, turn: PlannedTurn, avoid: Collection[WorkerView]
    ) -> WorkerView | None:
        """The worker; None if none of the role may be given work."""
        ready: Sequence[WorkerView] = self._cluster.ready(role)
        seed = None if turn.root is None else xxh3_64_intdigest(turn.root)
        return place(ready, None, avoid, seed=seed)
