"""A simulated cluster under load, routed by the real ``ppd.planning.Planner`` and its policies.

Owns the clock, the clients, and what happens to a turn from its arrival to its record, as
``router`` does it. What a step takes is ``cost_model``'s; what a worker does, ``sim_engine``'s.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count

from ppd.arrivals import ArrivalRate
from ppd.attempts import Attempts
from ppd.backlog import Backlog
from ppd.contract import Refusal, RefusalReason
from ppd.decision import Policy
from ppd.effects import (
    Abandon,
    Answered,
    Cause,
    Failed,
    Failure,
    Prefilled,
    Send,
    Settled,
    StreamEnded,
)
from ppd.errors import EngineError
from ppd.forecast import Forecast, blend
from ppd.placement import Placement as WorkerPlacement
from ppd.placement import Plan, PlannedTurn, WorkerView
from ppd.planning import Planner, Query
from ppd.prefix import MessageChain
from ppd.score import Objective, Weights
from ppd.sessions import SessionIndex, Turn

from .clock import Clock
from .cost_model import CostModel
from .engine import Engine, Job
from .rows import Result, TurnRow
from .traffic import Clients, Conversation
from .workers import Chunking, Cluster, Placement, Shape, SimulatedWorker

_BYTES_PER_TOKEN = 4  # the planner sees bytes, and tells tokens from them exactly


@dataclass(slots=True, eq=False)
class _Dialogue:
    """A conversation under way."""

    plan: Conversation
    root: bytes
    turn: int  # from 0
    prompt_tokens: int  # of the turn
    home: SimulatedWorker | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """A turn under way."""

    dialogue: _Dialogue
    planned: PlannedTurn
    attempts: Attempts
    at_ms: float  # its client's clock started
    first_ms: float = 0.0
    cached_tokens: int = 0
    moved_tokens: int = 0

    @property
    def plan(self) -> Plan:
        assert self.attempts.plan is not None
        return self.attempts.plan


class Simulation:
    """One run.

    Args:
        delta: only the KV that the decode worker does not hold is transferred.
    """

    def __init__(
        self,
        costs: CostModel,
        shape: Shape,
        policy: Policy,
        clients: Clients,
        seed: int,
        *,
        objective: Objective | None = None,
        delta: bool = False,
        chunking: Chunking | None = None,
        placement: Placement = Placement.CHANCE,
    ) -> None:
        self.clock = Clock()
        source = random.Random(seed)
        chunking = chunking or Chunking()
        self.cluster = Cluster(costs, shape, self.clock.at, source, chunking, placement)
        self._index = SessionIndex(capacity=1_000_000, ttl_s=1e9)
        self._arrivals, self._forecast = ArrivalRate(), Forecast()
        self.backlog = Backlog()
        self._numbers = count(1)
        self.planner = Planner(
            policy=policy,
            placement=WorkerPlacement(self.cluster, decode_fallback=False),
            index=self._index,
            arrivals=self._arrivals,
            forecast=self._forecast,
            backlog=self.backlog,
        )
        self._costs = costs
        self._clients = clients
        self._objective: Objective = objective or Weights()
        self._delta = delta
        self._free = clients.connections
        self._queue: deque[tuple[_Dialogue, float]] = deque()
        self._rows: list[TurnRow] = []

    def run(self, conversations: Iterable[Conversation]) -> Result:
        for plan in conversations:
            dialogue = _Dialogue(plan, b"%d" % plan.session, 0, plan.turns[0].new)
            self.clock.at(plan.at_s * 1e3, partial(self._arrive, dialogue))
        self.clock.run()
        engines = [worker.engine for worker in self.cluster.workers.values()]
        return Result(
            rows=self._rows,
            ended_s=self.clock.now_ms / 1e3,
            moved_tokens=sum(link.moved_tokens for link in self.cluster.links.values()),
            evicted_tokens=sum(engine.cache.evicted_tokens for engine in engines),
        )

    def _arrive(self, dialogue: _Dialogue, now_ms: float) -> None:
        if self._free == 0:
            self._queue.append((dialogue, now_ms))
        else:
            if self._free is not None:
                self._free -= 1
            self._start(dialogue, now_ms, now_ms)

    def _start(self, dialogue: _Dialogue, clock_ms: float, now_ms: float) -> None:
        now_s = now_ms / 1e3
        plan, root = dialogue.plan, dialogue.root
        self._arrivals.note(now_s)
        chain = _chain(plan, dialogue.turn)
        tokens = plan.turns[dialogue.turn].out
        query = Query("chat", chain, chain.total_bytes, "t", tokens, self._objective, root)
        if dialogue.home is None:
            dialogue.home = self.cluster.assign(root, plan.session)
        planned = self.planner.plan(query, 0, now_s)
        attempts = Attempts(
            planned, self.planner.placement, self.backlog, number=next(self._numbers)
        )
        request = _Request(dialogue, planned, attempts, clock_ms)
        dialogue.home.in_flight += 1
        effect = attempts.start()
        assert isinstance(effect, Send), "a simulated worker takes every turn, or refuses it later"
        self._later(self._costs.serving.request_ms, partial(self._send, request))

    def _send(self, request: _Request, now_ms: float) -> None:
        dialogue, plan = request.dialogue, request.plan
        if plan.prefill is not None:
            session, tokens = dialogue.plan.session, dialogue.prompt_tokens
            job = Job(session, tokens, 0, False, lambda _: None)
            job.done = partial(self._prefilled, request, job)
            self._engine(plan.prefill).submit(job, now_ms)
            return
        job = self._decoding(request, has_kv=False)
        job.min_cached_tokens = plan.min_cached_tokens
        job.refused = partial(self._refused, request)
        self._engine(plan.decode).submit(job, now_ms)

    def _refused(self, request: _Request, now_ms: float) -> None:
        """The home has lost the conversation: the attempts say what follows."""
        now_s = now_ms / 1e3
        refusal = Refusal(RefusalReason.TOO_FEW_CACHED_TOKENS)
        error = EngineError(refusal.to_message(), status=400)
        effect = request.attempts.on(Failed(Failure(Cause.ANSWERED, error, refusal)), now_s)
        assert isinstance(effect, Abandon)
        effect = request.attempts.on(Settled(), now_s)
        assert isinstance(effect, Send), "what the home refuses goes remote"
        self._send(request, now_ms)

    def _prefilled(self, request: _Request, job: Job, now_ms: float) -> None:
        dialogue, prefill = request.dialogue, request.plan.prefill
        assert prefill is not None
        home = self._engine(request.plan.decode)
        held = home.cache.cached_tokens(dialogue.plan.session) if self._delta else 0
        request.cached_tokens = job.cached_tokens
        request.moved_tokens = dialogue.prompt_tokens - held
        arrived_ms = self.cluster.links[prefill.name].send(request.moved_tokens, now_ms)
        self.clock.at(arrived_ms + self._costs.serving.handover_ms, partial(self._join, request))

    def _join(self, request: _Request, now_ms: float) -> None:
        self._engine(request.plan.decode).submit(self._decoding(request, has_kv=True), now_ms)

    def _decoding(self, request: _Request, *, has_kv: bool) -> Job:
        dialogue = request.dialogue
        tokens = dialogue.plan.turns[dialogue.turn].out
        job = Job(dialogue.plan.session, dialogue.prompt_tokens, tokens, has_kv, lambda _: None)
        job.keeps_reply = not self._clients.replies_lost
        job.first = partial(self._answered, request, job)
        job.done = partial(self._ended, request)
        return job

    def _answered(self, request: _Request, job: Job, now_ms: float) -> None:
        request.first_ms = now_ms
        if request.plan.prefill is None:
            request.cached_tokens = job.cached_tokens
        else:
            request.attempts.on(Prefilled(), now_ms / 1e3)
        request.attempts.on(Answered(streams=True), now_ms / 1e3)

    def _ended(self, request: _Request, now_ms: float) -> None:
        dialogue = request.dialogue
        plan, number = dialogue.plan, dialogue.turn + 1
        output_tokens = plan.turns[dialogue.turn].out
        request.attempts.on(StreamEnded(), now_ms / 1e3)
        assert dialogue.home is not None
        dialogue.home.in_flight -= 1
        ttft_ms = request.first_ms - request.at_ms
        e2e_ms = now_ms - request.at_ms
        tpot_ms = (now_ms - request.first_ms) / max(1, output_tokens - 1)
        failed = e2e_ms > self._clients.timeout_s * 1e3
        self._rows.append(
            TurnRow(
                plan.session,
                number,
                request.plan.route,
                request.plan.reason,
                request.at_ms / 1e3,
                ttft_ms,
                tpot_ms,
                e2e_ms,
                dialogue.prompt_tokens,
                output_tokens,
                request.cached_tokens,
                request.moved_tokens,
                failed,
            )
        )
        self._learn(request, output_tokens, ttft_ms, tpot_ms, now_ms / 1e3)
        if failed or number == len(plan.turns):
            self._leave(now_ms)
            return
        dialogue.prompt_tokens += output_tokens + plan.turns[number].new
        dialogue.turn = number
        pause_ms = plan.think_s[number - 1] * 1e3
        if plan.since_arrival:
            pause_ms = max(0.0, pause_ms - e2e_ms)
        if pause_ms:
            self._leave(now_ms)
            self._later(pause_ms, partial(self._arrive, dialogue))
        else:
            self._start(dialogue, now_ms, now_ms)

    def _learn(
        self, request: _Request, output_tokens: int, ttft_ms: float, tpot_ms: float, now_s: float
    ) -> None:
        dialogue, planned = request.dialogue, request.planned
        before = None if planned.hit is None else planned.hit.turn
        self._forecast.learn_reply("t", None, output_tokens)
        if request.plan.prefill is not None:
            worker: str | None = request.plan.prefill.identity
            tokens = dialogue.prompt_tokens
        elif before is not None:
            worker, tokens = before.prefill_worker, before.prefill_tokens
        else:
            worker, tokens = None, 0
        turn = Turn(
            session=dialogue.plan.session,
            number=dialogue.turn + 1,
            home=request.plan.decode.identity,
            prompt_tokens=dialogue.prompt_tokens,
            completion_tokens=output_tokens,
            prefill_worker=worker,
            prefill_tokens=0 if worker is None else tokens,
            usual_reply_tokens=blend(
                None if before is None else before.usual_reply_tokens, output_tokens
            ),
            loses_replies=self._clients.replies_lost,
        )
        after = None if planned.hit is None else planned.hit.digest
        self._index.record(_chain(dialogue.plan, dialogue.turn), turn, now_s, after)
        if planned.features is not None:
            route = request.plan.route
            self.planner.policy.observe(planned.features, route, ttft_ms, tpot_ms)

    def _leave(self, now_ms: float) -> None:
        """A connection is free: whoever waits longest takes it."""
        if self._queue:
            dialogue, since_ms = self._queue.popleft()
            self._start(dialogue, since_ms, now_ms)
        elif self._free is not None:
            self._free += 1

    def _engine(self, view: WorkerView) -> Engine:
        return self.cluster.workers[view.name].engine

    def _later(self, ms: float, then: Callable[[float], None]) -> None:
        self.clock.at(self.clock.now_ms + ms, then)


def _chain(plan: Conversation, turn: int) -> MessageChain:
    """A chat as the router hashes it, its text left out: a boundary after each message."""
    digests: list[bytes] = []
    sizes: list[int] = []
    tokens = 0
    for number, exchange in enumerate(plan.turns[: turn + 1]):
        for message, added in enumerate((exchange.new, exchange.out)):
            tokens += added
            digests.append(b"%d/%d/%d" % (plan.session, number, message))
            sizes.append(tokens * _BYTES_PER_TOKEN)
    return MessageChain(tuple(digests[:-1]), tuple(sizes[:-1]), 0)
