"""Which workers serve an attempt: home, exclusions, room, and a hash with bounded load.

The router places by ``place``, and so does the simulator with ``bounded-hash``. This module
chooses workers only; the route is ``ppd.decision``'s, what follows a failure ``ppd.attempts``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from ppd.backlog import NO_WORK, Work
from ppd.contract import Role
from ppd.decision import Decision, Features, Reason, Route
from ppd.errors import WorkerError
from ppd.headroom import Headroom
from ppd.prefill_times import PrefillTimes
from ppd.sessions import Hit

MAX_LOAD = 1.25  # of a worker, against the mean: busier ones get no new conversations

# An enum's attribute is slow to look up (Python 3.11), and every request would.
_PREFILL, _DECODE, _REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA
_LOCAL, _REMOTE, _VIA_REPLICA = Route.LOCAL, Route.REMOTE, Route.REPLICA
_HOME_FULL = Reason.HOME_FULL

_SIDE_SEED = 1  # of the hash that divides conversations between replicas and P/D workers


class WorkerView(Protocol):
    """A worker as the core sees it; the router's and the simulator's workers are such views.

    Attributes:
        name: what is hashed; stays the same when the worker restarts.
        identity: names its process and KV cache; changes when the cache is lost.
        in_flight: requests sent to it and not ended.
        running: requests that decode there.
        takes_appends: it offers local append-prefills.
        page_size: of its KV cache, in tokens.
        headroom: KV that it has left.
    """

    role: Role
    in_flight: int
    headroom: Headroom

    @property
    def name(self) -> str:
        """What is hashed."""
        ...

    @property
    def identity(self) -> str:
        """Of its process and KV cache."""
        ...

    @property
    def running(self) -> int:
        """Requests that decode there."""
        ...

    @property
    def takes_appends(self) -> bool:
        """Whether it offers local turns."""
        ...

    @property
    def page_size(self) -> int:
        """In tokens."""
        ...

    def has_room(self, tokens: int) -> bool:
        """Whether it has KV for so many tokens, as far as it reports."""
        ...

    def evicted_tokens(self, session: int) -> int:
        """Tokens that it is known to have dropped from a conversation's end."""
        ...


class ClusterView(Protocol):
    """The workers there are."""

    def find(self, identity: str | None) -> WorkerView | None:
        """The worker of that identity, if it may be given work."""
        ...

    def ready(self, role: Role) -> Sequence[WorkerView]:
        """The workers of a role that may be given work."""
        ...

    def has(self, role: Role) -> bool:
        """Whether there is any worker of that role, ready or not."""
        ...

    def place(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView] = (),
        tokens: int = 0,
        root: bytes | None = None,
    ) -> WorkerView | None:
        """The worker of that role for a request; see ``place``."""
        ...

    def opening(self, root: bytes | None) -> Route | None:
        """The route of a turn without a home; None: the policy's."""
        ...

    @property
    def decode_workers(self) -> int:
        """How many workers decode, replicas included."""
        ...


W = TypeVar("W", bound=WorkerView)


def place(
    ready: Sequence[W],
    prefer: W | None,
    avoid: Collection[W] = (),
    tokens: int = 0,
    seed: int | None = None,
) -> W | None:
    """Choose one of the workers that may be given work.

    ``prefer`` is taken if it is one of them, not avoided and has room, for its caches are warm.
    Else a conversation is placed by rendezvous hashing with bounded loads (Thaler and Ravishankar
    1998; arXiv 1608.01350): routers that share no state choose the same worker, as long as they
    see the cluster evenly loaded. Avoided workers and those without room come last.

    Args:
        ready: workers of one role.
        prefer: the worker whose caches are warm, if there is one.
        avoid: workers that have failed this request, or must not take it.
        tokens: KV that the request needs.
        seed: of the hash, from the conversation; None: the least busy worker is taken.

    Returns:
        The worker; None if ``ready`` is empty.
    """
    if not ready:
        return None
    if prefer is not None and prefer in ready and prefer not in avoid and prefer.has_room(tokens):
        return prefer
    if len(ready) == 1:
        return ready[0]
    fit = [w for w in ready if w not in avoid and w.has_room(tokens)]
    if seed is None or not fit:
        return min(ready, key=lambda w: (w in avoid, not w.has_room(tokens), w.in_flight))
    bound = MAX_LOAD * (1 + sum(w.in_flight for w in ready)) / len(ready)
    fit = [w for w in fit if w.in_flight < bound] or fit
    return max(fit, key=lambda w: xxh3_64_intdigest(w.name.encode(), seed))


def opening_side(
    replicas: Sequence[WorkerView],
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    root: bytes | None,
) -> Route | None:
    """Choose the side of a turn without a home where replicas stand beside P/D workers.

    Each worker gets its share of new conversations, unless one side has more requests under way
    on each worker than the bound allows.

    Args:
        replicas: those that may be given work.
        prefill: likewise.
        decode: likewise.
        root: names the conversation; None: the less busy side is taken.

    Returns:
        ``REPLICA`` or ``REMOTE``; None where no replica is ready.
    """
    if not (replicas and prefill and decode):
        return Route.REPLICA if replicas else None
    apart = len(prefill) + len(decode)
    on_replicas = sum(w.in_flight for w in replicas) / len(replicas)
    on_decode = sum(w.in_flight for w in decode) / apart
    share = len(replicas) / (len(replicas) + apart)
    bound = MAX_LOAD * (on_replicas * share + on_decode * (1 - share))
    if root is None or max(on_replicas, on_decode) > bound + 1:
        return Route.REPLICA if on_replicas < on_decode else Route.REMOTE
    at = xxh3_64_intdigest(root, _SIDE_SEED) / 2**64
    return Route.REPLICA if at < share else Route.REMOTE


class Plan(msgspec.Struct, frozen=True, gc=False):
    """One attempt: a route and the workers that serve it. What was priced is what is sent to.

    Attributes:
        decision: the route, its reason, what the table gave.
        decode: the worker that generates the reply; on the replica route it prefills, too.
        prefill: the prefill worker of a remote turn; else None.
        min_cached_tokens: precondition of a local turn.
        prefill_tokens: to compute before the first token; reserved at the worker that prefills.
            0 on the replica route, where nothing is reserved.
    """

    decision: Decision
    decode: WorkerView
    prefill: WorkerView | None = None
    min_cached_tokens: int = 0
    prefill_tokens: int = 0

    @property
    def route(self) -> Route:
        """Where the turn is prefilled."""
        return self.decision.route

    @property
    def reason(self) -> Reason:
        """Why it took that route."""
        return self.decision.reason

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All workers that it is sent to."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class PlannedTurn(msgspec.Struct, gc=False):
    """A turn whose route is decided, and its first plan.

    Attributes:
        hit: the earlier turn that it continues; None if none is known.
        features: what the decision was made from; None without a hit.
        decision: the route.
        remote_tokens: what a remote turn adds to its prefill worker's queue, as far as known.
        kv_tokens: KV that it needs on the worker that decodes it.
        root: names the conversation for placement; None for several prompts.
        single: it has one prompt.
        prefill: the prefill worker that the decision was priced with, if one is ready.
        held: tokens of the prompt that workers are believed to hold, by identity, of a turn
            without a hit.
        plan: None if no worker can take it; ``Placement.plan`` raises the reason.
        times: of prefill workers, by the policy's table; None without one.
    """

    hit: Hit | None
    features: Features | None
    decision: Decision
    remote_tokens: int
    kv_tokens: int
    root: bytes | None
    single: bool
    prefill: WorkerView | None
    plan: Plan | None = None
    held: Mapping[str, int] = {}
    times: PrefillTimes | None = None

    def work(self, plan: Plan) -> Work:
        """What the prefill worker of a plan does for it: only KV that the home lacks is sent."""
        if self.times is None or plan.prefill is None:
            return NO_WORK
        prompt_tokens, held_tokens = self.remote_tokens, 0
        if self.features is not None and self.hit is not None:
            prompt_tokens = self.features.prompt_tokens
            if plan.decode.identity == self.hit.turn.home:
                held_tokens = self.features.held_tokens
        cached_tokens = max(0, prompt_tokens - plan.prefill_tokens)
        return Work(
            self.times.compute_ms(cached_tokens, prompt_tokens - cached_tokens),
            self.times.transfer_ms * max(0, prompt_tokens - held_tokens),
        )


class Chooser(Protocol):
    """Chooses among the workers of a role for a turn that no worker is preferred for."""

    def __call__(
        self, role: Role, turn: PlannedTurn, avoid: Collection[WorkerView]
    ) -> WorkerView | None:
        """The worker; None if none of the role may be given work."""
        ...


class Placement:
    """Makes plans: a decision and the workers that carry it out.

    Args:
        decode_fallback: where no prefill worker is left, decode workers prefill whole prompts.
        chooser: of new conversations' workers; None: the cluster's own ``place``.
    """

    def __init__(
        self, cluster: ClusterView, *, decode_fallback: bool, chooser: Chooser | None = None
    ) -> None:
        self.cluster = cluster
        self._decode_fallback = decode_fallback
        self._chooser = chooser

    def plan(
        self, turn: PlannedTurn, decision: Decision, failed: Collection[WorkerView] = ()
    ) -> Plan:
        """Name the workers of an attempt.

        The route may become another one: where only replicas are left, where only the others
        are, or where no prefill worker is left and a decode worker prefills the whole prompt.

        Args:
            turn: as it was planned.
            decision: as decided for the turn, or as a failure has changed it.
            failed: workers that have failed this request; they are taken last.

        Raises:
            WorkerError: no worker of a role that is needed may be given work.
        """
        if decision.route is _LOCAL:
            return self._local(turn, decision)
        if self._takes_replica(decision.route, failed):
            return self._replica(turn, decision, failed)
        if (decode := self.fallback(turn, failed)) is not None:
            whole = Decision(_LOCAL, Reason.NO_PREFILL)
            return Plan(whole, decode, prefill_tokens=turn.remote_tokens)
        return self._remote(turn, decision, failed)

    def has_alternative(
        self, turn: PlannedTurn, worker: WorkerView, failed: Collection[WorkerView]
    ) -> bool:
        """Whether other workers can do what ``worker`` did not."""
        if self._any(worker.role, failed) or self.fallback(turn, failed) is not None:
            return True
        if worker.role is _REPLICA:
            return self._any(_PREFILL, failed) and self._any(_DECODE, failed)
        return self._any(_REPLICA, failed)

    def fallback(self, turn: PlannedTurn, failed: Collection[WorkerView]) -> WorkerView | None:
        """A decode worker that can prefill the whole prompt, where no prefill worker is left."""
        if not self._decode_fallback or not turn.single or self._any(_PREFILL, failed):
            return None
        ready = self.cluster.ready(_DECODE)
        able = [w for w in ready if w.takes_appends and w not in failed]
        home = self._home(turn, _DECODE)
        return min(able, key=lambda w: (w is not home, w.in_flight), default=None)

    def _local(self, turn: PlannedTurn, decision: Decision) -> Plan:
        assert turn.hit is not None, "a local turn continues another one"
        assert turn.features is not None
        home = self.cluster.find(turn.hit.turn.home)
        assert home is not None, "it was ready when this was decided, and nothing has been awaited"
        tokens = turn.features.uncached_at_home
        least = turn.features.min_cached_tokens
        return Plan(decision, home, min_cached_tokens=least, prefill_tokens=tokens)

    def _replica(
        self, turn: PlannedTurn, decision: Decision, failed: Collection[WorkerView]
    ) -> Plan:
        home = self._home(turn, _REPLICA)
        worker = self._require(_REPLICA, home, failed, turn.kv_tokens, turn)
        if decision.route is not _VIA_REPLICA:
            decision = Decision(_VIA_REPLICA, decision.reason)
        return Plan(decision, worker)

    def _remote(
        self, turn: PlannedTurn, decision: Decision, failed: Collection[WorkerView]
    ) -> Plan:
        prefill = turn.prefill
        if prefill is None or failed or prefill not in self.cluster.ready(_PREFILL):
            seen_by = None
            if turn.hit is not None:
                seen_by = self.cluster.find(turn.hit.turn.prefill_worker)
            prefill = self._require(_PREFILL, seen_by, failed, 0, turn)
        home = self._home(turn, _DECODE)
        avoided = failed
        if decision.reason is _HOME_FULL and home is not None:
            avoided = [*failed, home]
        decode = self._require(_DECODE, home, avoided, turn.kv_tokens, turn)
        if decision.route is not _REMOTE:
            decision = Decision(_REMOTE, decision.reason)
        tokens = turn.remote_tokens
        if turn.held:
            tokens = max(1, tokens - turn.held.get(prefill.identity, 0))
        elif turn.features is not None and turn.prefill not in (None, prefill):
            tokens = turn.features.prompt_tokens  # what the first one had cached is not there
        return Plan(decision, decode, prefill, prefill_tokens=tokens)

    def _takes_replica(self, route: Route, failed: Collection[WorkerView]) -> bool:
        """Whether a replica serves the attempt; as decided, unless only one side is left."""
        decided = route is _VIA_REPLICA
        if not self.cluster.has(_REPLICA):
            return decided
        replicas = self._any(_REPLICA, failed)
        apart = self._any(_PREFILL, failed) and self._any(_DECODE, failed)
        return decided if replicas is apart else replicas

    def _home(self, turn: PlannedTurn, role: Role) -> WorkerView | None:
        """The conversation's home, if it is of that role and may be given work."""
        home = self.cluster.find(turn.hit.turn.home) if turn.hit else None
        return home if home is not None and home.role is role else None

    def _any(self, role: Role, failed: Collection[WorkerView]) -> bool:
        ready = self.cluster.ready(role)
        return any(worker not in failed for worker in ready) if failed else bool(ready)

    def _require(
        self,
        role: Role,
        prefer: WorkerView | None,
        avoid: Collection[WorkerView],
        tokens: int,
        turn: PlannedTurn,
    ) -> WorkerView:
        if self._chooser is None:
            worker = self.cluster.place(role, prefer, avoid, tokens, turn.root)
        elif prefer is not None and prefer not in avoid and prefer.has_room(tokens):
            return prefer  # ``find`` has given it, so it may be given work
        else:
            worker = self._chooser(role, turn, avoid)
        if worker is None:
            raise WorkerError(f"no {role} worker is alive, or all are being drained")
        return worker
