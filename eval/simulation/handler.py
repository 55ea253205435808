"""Carries out the attempts of simulated requests, as ``router/serving/handler.py`` does for real.

Events of simulated workers go into ``ppd.attempts``, its effects are performed here. What is
simplified: a connection is refused, and a worker probed, in no time; an abandoned prefill runs to
its end on its worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ppd.attempts import Attempts
from ppd.contract import Refusal, RefusalReason
from ppd.effects import (
    Abandon,
    Answered,
    Cause,
    Effect,
    Event,
    Failed,
    Failure,
    Finish,
    Note,
    Prefilled,
    PrefillFailed,
    Relay,
    Send,
    Settled,
    StreamBroke,
    StreamEnded,
)
from ppd.errors import EngineError
from ppd.placement import Plan, PlannedTurn

from .cache import SharedPrefix
from .clock import Clock
from .cost_model import Costs
from .engine import Engine, Job
from .outages import Outage
from .workers import Cluster, SimulatedServer, SimulatedWorker

PROBE_INTERVAL_S = 2.0  # ppd-router's default

_REFUSED = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS)
_REFUSAL = Failure(Cause.ANSWERED, EngineError(_REFUSED.to_message(), status=400), _REFUSED)
_UNCONNECTED = Failure(Cause.UNCONNECTED, EngineError("nothing listens there", status=502))
_LOST = Failure(Cause.LOST, EngineError("the worker is gone", status=502))


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A turn under way.

    Attributes:
        at_ms: when its client's clock started.
        first_ms: when its first token came.
        cached_tokens: of its prompt, where it was prefilled first.
        moved_tokens: KV transferred, by all attempts.
        generated_tokens: of a stream that was broken off.
        decoding: the job of the latest attempt that generates.
        legs: the workers that serve it just now.
        home: the worker that counts it as in flight.
        prefiller: the prefill worker that does.
        place: the decode worker's engine that holds a place for KV that has not come yet.
        shared: the prefix of its prompt that other conversations have, too.
    """

    session: int
    prompt_tokens: int
    output_tokens: int
    planned: PlannedTurn
    attempts: Attempts
    at_ms: float
    first_ms: float = 0.0
    cached_tokens: int = 0
    moved_tokens: int = 0
    generated_tokens: int = 0
    decoding: Job | None = None
    legs: frozenset[SimulatedWorker] = frozenset()
    home: SimulatedWorker | None = None
    prefiller: SimulatedWorker | None = None
    place: Engine | None = None
    shared: SharedPrefix | None = None

    @property
    def plan(self) -> Plan:
        """Of the latest attempt."""
        assert self.attempts.plan is not None
        return self.attempts.plan


class SimulatedHandler:
    """Sends requests to simulated workers, and hands their events to their attempts.

    Args:
        delta: only the KV that the decode worker does not hold is transferred.
        keeps_replies: generated tokens stay cached.
        ended: is called once with each request, when it has ended.
    """

    def __init__(
        self,
        costs: Costs,
        cluster: Cluster,
        clock: Clock,
        *,
        delta: bool,
        keeps_replies: bool,
        ended: Callable[[SimulatedRequest, float], None],
    ) -> None:
        self._costs = costs
        self._cluster = cluster
        self._clock = clock
        self._delta = delta
        self._keeps_replies = keeps_replies
        self._ended = ended
        self._under_way: dict[SimulatedRequest, None] = {}  # in the order of their start

    def schedule(self, outage: Outage) -> None:
        """Have a worker die and come back.

        Raises:
            ConfigError: the cluster has no such worker.
        """
        server = self._cluster.named(outage.worker)
        back_s = outage.at_s + outage.for_s
        self._clock.at(1e3 * outage.at_s, partial(self._die, server))
        self._clock.at(1e3 * back_s, lambda _: server.restart())
        for happens_s in (outage.at_s, back_s):
            probe_s = PROBE_INTERVAL_S * (math.floor(happens_s / PROBE_INTERVAL_S) + 1)
            self._clock.at(1e3 * probe_s, lambda _: server.probe())

    def start(self, request: SimulatedRequest, now_ms: float) -> None:
        """Begin a request."""
        self._under_way[request] = None
        effect = request.attempts.start()
        if isinstance(effect, Send):
            self._count(request, effect.plan)
            self._clock.at(now_ms + self._costs.request_ms, partial(self._perform, request, effect))
        else:
            self._perform(request, effect, now_ms)

    def _on(self, request: SimulatedRequest, event: Event, now_ms: float) -> None:
        self._perform(request, request.attempts.on(event, now_ms / 1e3), now_ms)

    def _perform(self, request: SimulatedRequest, effect: Effect, now_ms: float) -> None:
        if isinstance(effect, Send):
            self._send(request, effect.plan, now_ms)
        elif isinstance(effect, Abandon):
            request.legs = frozenset()
            self._release(request, now_ms)
            for view in (effect.worker, *effect.probe) if effect.down else effect.probe:
                self._cluster.workers[view.name].server.probe()
            self._on(request, Settled(), now_ms)
        elif isinstance(effect, Finish):
            self._finish(request, now_ms)
        else:
            assert isinstance(effect, Relay | Note), "no passage is retrieved here"

    # -- the legs of an attempt ----------------------------------------------------------------

    def _send(self, request: SimulatedRequest, plan: Plan, now_ms: float) -> None:
        self._count(request, plan)
        home = self._cluster.workers[plan.decode.name]
        prefill = None if plan.prefill is None else self._cluster.workers[plan.prefill.name]
        if prefill is not None and not prefill.alive:
            self._on(request, PrefillFailed(_UNCONNECTED), now_ms)
        elif not home.alive:
            self._on(request, Failed(_UNCONNECTED), now_ms)
        elif prefill is not None:
            request.legs = frozenset((prefill, home))
            decoding = self._decode(request, plan, has_kv=True)
            if self._costs.overlap:
                # The decode worker makes room for the KV between two steps; only then the prefill
                # worker begins.
                decoding.reserved = partial(self._prefill, request, plan, decoding)
                request.place = home.engine
                home.engine.submit(decoding, now_ms)
            else:
                self._prefill(request, plan, decoding, now_ms)
        else:
            request.legs = frozenset((home,))
            job = self._decode(request, plan, has_kv=False)
            job.min_cached_tokens = plan.min_cached_tokens
            job.refused = partial(self._on, request, Failed(_REFUSAL))
            home.engine.submit(job, now_ms)

    def _prefill(self, request: SimulatedRequest, plan: Plan, decoding: Job, now_ms: float) -> None:
        assert plan.prefill is not None
        prefill = self._cluster.workers[plan.prefill.name]
        if not (self._is_waiting(request, plan) and prefill.alive):
            return
        job = Job(request.session, decoding.prompt_tokens, 0, False, lambda _: None)
        job.done = partial(self._prefilled, request, plan, job, decoding)
        job.shared = request.shared
        prefill.engine.submit(job, now_ms)

    def _prefilled(
        self, request: SimulatedRequest, plan: Plan, job: Job, decoding: Job, now_ms: float
    ) -> None:
        if not self._is_waiting(request, plan):
            return
        prefill = plan.prefill
        assert prefill is not None
        home = self._cluster.workers[plan.decode.name]
        held = 0
        if self._delta and self._costs.overlap:
            held = decoding.cached_tokens  # in its place, where nothing evicts it
        elif self._delta:
            held = home.engine.cache.cached_tokens(request.session, request.shared)
        if not request.generated_tokens:
            request.cached_tokens = job.cached_tokens
        moved_tokens = job.prompt_tokens - held
        request.moved_tokens += moved_tokens
        arrived_ms = self._cluster.send(prefill.name, home, moved_tokens, now_ms)
        joins_ms = arrived_ms + self._costs.handover_ms
        self._clock.at(joins_ms, partial(self._join, request, plan, decoding))

    def _join(self, request: SimulatedRequest, plan: Plan, decoding: Job, now_ms: float) -> None:
        """The KV has arrived: the prefill worker has done its part."""
        if not self._is_waiting(request, plan):
            return
        home = self._cluster.workers[plan.decode.name]
        request.legs = frozenset((home,))
        if request.place is not None:
            request.place = None
            home.engine.deliver(decoding, now_ms)
        else:
            home.engine.submit(decoding, now_ms)

    def _release(self, request: SimulatedRequest, now_ms: float) -> None:
        """Give up a place for KV that will not come."""
        if request.place is not None and request.decoding is not None:
            place, request.place = request.place, None
            place.release(request.decoding, now_ms)

    def _decode(self, request: SimulatedRequest, plan: Plan, *, has_kv: bool) -> Job:
        done = request.generated_tokens
        tokens = request.prompt_tokens + done
        job = Job(request.session, tokens, request.output_tokens - done, has_kv, lambda _: None)
        job.keeps_reply, job.shared = self._keeps_replies, request.shared
        job.first = partial(self._answered, request, plan, job)
        job.done = partial(self._on, request, StreamEnded())
        request.decoding = job
        return job

    def _answered(self, request: SimulatedRequest, plan: Plan, job: Job, now_ms: float) -> None:
        if not request.first_ms:
            request.first_ms = now_ms
        if plan.prefill is not None:
            self._count_prefill(request, None)
            self._on(request, Prefilled(), now_ms)
        elif not request.generated_tokens:
            request.cached_tokens = job.cached_tokens
        self._on(request, Answered(streams=True), now_ms)

    def _is_waiting(self, request: SimulatedRequest, plan: Plan) -> bool:
        """Whether an attempt is still wanted; a plan is of one attempt only."""
        return request.attempts.plan is plan and bool(request.legs)

    # -- the end -------------------------------------------------------------------------------

    def _die(self, server: SimulatedServer, now_ms: float) -> None:
        """A server's connections break, and its KV is lost."""
        generated = server.die(now_ms)
        ranks = {worker.name for worker in server.ranks}
        for request in [r for r in self._under_way if any(w.server is server for w in r.legs)]:
            plan, job = request.plan, request.decoding
            if plan.decode.name not in ranks:
                self._on(request, PrefillFailed(_LOST), now_ms)
            elif job is not None and generated.get(job):
                request.generated_tokens += generated[job]
                self._on(request, StreamBroke(resumable=True), now_ms)
            else:
                self._on(request, Failed(_LOST), now_ms)

    def _finish(self, request: SimulatedRequest, now_ms: float) -> None:
        del self._under_way[request]
        request.legs = frozenset()
        self._release(request, now_ms)
        self._count(request, None)
        self._ended(request, now_ms)

    def _count(self, request: SimulatedRequest, plan: Plan | None) -> None:
        """Count a request at the worker that decodes it."""
        home = None if plan is None else self._cluster.workers[plan.decode.name]
        if request.home is not None:
            request.home.in_flight -= 1
        if home is not None:
            home.in_flight += 1
        request.home = home
        self._count_prefill(request, plan)

    def _count_prefill(self, request: SimulatedRequest, plan: Plan | None) -> None:
        """Count a request at the worker that prefills it, until it has answered."""
        prefill = None if plan is None else plan.prefill
        if request.prefiller is not None:
            request.prefiller.in_flight -= 1
        request.prefiller = None if prefill is None else self._cluster.workers[prefill.name]
        if request.prefiller is not None:
            request.prefiller.in_flight += 1
