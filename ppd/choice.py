"""Which worker a new conversation gets: queue, KV in use, and long prefixes that lie there.

A prefill worker costs what a request has to wait for there: the tokens in its queue, and those of
the prompt that it does not hold. The cheapest one is taken. So a shared prefix draws requests to
its worker until the queue there is as long as the prefix; then another worker computes it, too.

A decode worker needs room and few requests beside the new one. Workers that are much fuller than
the emptiest, or have more than ``MAX_LOAD`` times the mean number of requests, are left out. Among
the others those with the longest part of the prompt come first: less KV is transferred and held.

Among workers that are about equal the rendezvous hash decides. So routers that share no state
choose the same worker as long as they see about the same load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.placement import MAX_LOAD, ClusterView, PlannedTurn, WorkerView
from ppd.shared_load import SharedLoad

MIN_SLACK = 256  # tokens; prefill workers whose costs differ by less are equal
SLACK = 0.1  # share of the least cost, likewise
MIN_LEFT = 0.75  # of the KV that the emptiest decode worker has left

_PREFILL = Role.PREFILL  # an enum's attribute is slow to look up (Python 3.11)

W = TypeVar("W", bound=WorkerView)


class PlacementRule(StrEnum):
    """The choice of a new conversation's workers: ``ByLoad``, or by a hash with bounded load."""

    LOAD = "load"
    HASH = "hash"


class ByLoad:
    """A ``ppd.placement.Chooser`` by queued prefill tokens, KV in use and shared prefixes.

    Args:
        cluster: the workers.
        backlog: the prefill queues of the workers, by the turns of this router or of several.
    """

    def __init__(self, cluster: ClusterView, backlog: Backlog | SharedLoad) -> None:
        self._cluster = cluster
        self._backlog = backlog

    def __call__(
        self, role: Role, turn: PlannedTurn, avoid: Collection[WorkerView]
    ) -> WorkerView | None:
        """The worker; None if none of the role may be given work."""
        ready, held = self._cluster.ready(role), turn.held
        seed = None if turn.root is None else int.from_bytes(turn.root[:8])
        if role is _PREFILL:
            queued = self._backlog.of
            return choose_prefill(ready, avoid, turn.remote_tokens, held, queued, seed)
        return choose_decode(ready, avoid, turn.kv_tokens, held, seed)


def choose_prefill(
    ready: Sequence[W],
    avoid: Collection[WorkerView],
    prompt_tokens: int,
    held: Mapping[str, int],
    queued: Callable[[str], int],
    seed: int | None,
) -> W | None:
    """Choose the prefill worker of a prompt that continues no known conversation.

    Args:
        ready: prefill workers that may be given work.
        avoid: workers that have failed this request; they are taken last.
        prompt_tokens: of the prompt.
        held: tokens of the prompt that each worker holds, by its identity.
        queued: returns the tokens that wait for a worker of an identity, or are being prefilled.
        seed: of the hash, from the conversation; None: the cheapest worker is taken.

    Returns:
        The worker; None if ``ready`` is empty.
    """
    fit = _without(ready, avoid) if avoid else ready
    if len(fit) < 2:
        return fit[0] if fit else None
    costs = [queued(w.identity) for w in fit]
    if held:
        most = max(0, prompt_tokens - 1)  # the last token is always computed
        costs = [c - min(held.get(w.identity, 0), most) for c, w in zip(costs, fit, strict=True)]
    least = min(costs)
    if seed is None:
        return fit[costs.index(least)]
    bound = least + max(MIN_SLACK, SLACK * (least + prompt_tokens))
    return _hashed([w for w, cost in zip(fit, costs, strict=True) if cost <= bound], seed)


def choose_decode(
    ready: Sequence[W],
    avoid: Collection[WorkerView],
    kv_tokens: int,
    held: Mapping[str, int],
    seed: int | None,
) -> W | None:
    """Choose the worker that shall hold a new conversation.

    Args:
        ready: decode workers, or replicas, that may be given work.
        avoid: workers that have failed this request, or must not take it; they are taken last.
        kv_tokens: that the request needs.
        held: tokens of the prompt that each worker holds, by its identity.
        seed: of the hash, from the conversation; None: the least busy worker is taken.

    Returns:
        The worker; None if ``ready`` is empty.
    """
    fit = _without(ready, avoid) if avoid else ready
    fit = [w for w in fit if w.has_room(kv_tokens)] or fit
    if len(fit) < 2:
        return fit[0] if fit else None
    under_way = 1
    max_left: int | None = None
    for worker in fit:
        under_way += worker.in_flight
    bound = MAX_LOAD * under_way / len(fit)
    calm: list[tuple[W, int | None]] = []  # the least busy worker always is
    for worker in fit:
        if worker.in_flight < bound:
            left = worker.headroom.left_tokens
            calm.append((worker, left))
            if left is not None and (max_left is None or left > max_left):
                max_left = left
    # More may be reserved than there is. The worker with the most left always remains.
    least = 0.0 if max_left is None else min(max_left, MIN_LEFT * max_left)
    fit = [worker for worker, left in calm if left is None or left >= least]
    if held:
        max_held = max(held.get(w.identity, 0) for w in fit)
        fit = [w for w in fit if held.get(w.identity, 0) >= max_held - MIN_SLACK]
    return min(fit, key=lambda w: w.in_flight) if seed is None else _hashed(fit, seed)


def _without(ready: Sequence[W], avoid: Collection[WorkerView]) -> list[W]:
    return [w for w in ready if w not in avoid] or list(ready)


def _hashed(fit: Sequence[W], seed: int) -> W:
    """The worker with the highest hash (rendezvous hashing)."""
    return max(fit, key=lambda w: xxh3_64_intdigest(w.name.encode(), seed))
