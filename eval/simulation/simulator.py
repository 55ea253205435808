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

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.decision import Policy, Reason, Route
from ppd.forecast import Forecast, blend
from ppd.planning import Judgement, Planner, Query
from ppd.prefix import MessageChain
from ppd.score import Objective, Weights
from ppd.sessions import SessionIndex, Turn

from .clock import Clock
from .cost_model import CostModel
from .engine import Job
from .rows import Result, TurnRow
from .traffic import Clients, Conversation
from .workers import Chunking, Cluster, Placement, Shape

_BYTES_PER_TOKEN = 4  # the planner sees bytes, and tells tokens from them exactly


@dataclass(slots=True, eq=False)
class _Talk:
    """A conversation under way."""

    plan: Conversation
    turn: int  # from 0
    prompt_tokens: int  # of the turn
    home: str | None = None


@dataclass(slots=True, eq=False)
class _Course:
    """A turn under way."""

    talk: _Talk
    judged: Judgement
    route: Route
    reason: Reason
    at_ms: float  # its client's clock started
    first_ms: float = 0.0
    cached_tokens: int = 0
    moved_tokens: int = 0
    prefill: str | None = None
    reserved: tuple[str, int] | None = None


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
        self.planner = Planner(
            policy=policy,
            cluster=self.cluster,
            index=(index := SessionIndex(capacity=1_000_000, ttl_s=1e9)),
            arrivals=(arrivals := ArrivalRate()),
            forecast=(forecast := Forecast()),
            backlog=(backlog := self.cluster.backlog),
        )
        self._index, self._arrivals, self._forecast = index, arrivals, forecast
        self._backlog: Backlog = backlog
        self._costs = costs
        self._clients = clients
        self._objective: Objective = objective or Weights()
        self._delta = delta
        self._free = clients.connections
        self._queue: deque[tuple[_Talk, float]] = deque()
        self._rows: list[TurnRow] = []

    def run(self, conversations: Iterable[Conversation]) -> Result:
        for plan in conversations:
            talk = _Talk(plan, 0, plan.turns[0].new)
            self.clock.at(plan.at_s * 1e3, partial(self._arrive, talk))
        self.clock.run()
        engines = self.cluster.engines.values()
        return Result(
            rows=self._rows,
            ended_s=self.clock.now_ms / 1e3,
            moved_tokens=sum(link.moved_tokens for link in self.cluster.links.values()),
            evicted_tokens=sum(engine.cache.evicted_tokens for engine in engines),
        )

    def _arrive(self, talk: _Talk, now_ms: float) -> None:
        if self._free == 0:
            self._queue.append((talk, now_ms))
        else:
            if self._free is not None:
                self._free -= 1
            self._start(talk, now_ms, now_ms)

    def _start(self, talk: _Talk, clock_ms: float, now_ms: float) -> None:
        now_s = now_ms / 1e3
        plan = talk.plan
        self._arrivals.note(now_s)
        chain = _chain(plan, talk.turn)
        tokens = plan.turns[talk.turn].out
        query = Query("chat", chain, chain.total_bytes, "t", tokens, self._objective)
        judged = self.planner.plan(query, now_s)
        course = _Course(talk, judged, judged.decision.route, judged.decision.reason, clock_ms)
        if talk.home is None:
            talk.home = self.cluster.place(plan.session)
        self.cluster.under_way[talk.home] += 1
        if self.cluster.is_replica(talk.home):
            course.route = Route.REPLICA
        features = judged.features
        if course.route is Route.LOCAL:
            assert features is not None
            self._reserve(course, talk.home, features.uncached_at_home)
            least = features.min_cached_tokens
        elif course.route is Route.REMOTE:
            course.prefill = self._prefill_of(judged)
            self._reserve(course, course.prefill, judged.remote_tokens)
            least = 0
        else:
            least = 0
        self._later(self._costs.serving.request_ms, partial(self._send, course, least))

    def _send(self, course: _Course, min_cached_tokens: int, now_ms: float) -> None:
        talk = course.talk
        assert talk.home is not None
        if course.route is Route.REMOTE:
            assert course.prefill is not None
            job = Job(talk.plan.session, talk.prompt_tokens, 0, False, lambda _: None)
            job.done = partial(self._prefilled, course, job)
            self.cluster.engines[course.prefill].submit(job, now_ms)
            return
        job = self._decoding(course, has_kv=False)
        job.min_cached_tokens = min_cached_tokens
        job.refused = partial(self._refused, course)
        self.cluster.engines[talk.home].submit(job, now_ms)

    def _refused(self, course: _Course, now_ms: float) -> None:
        """The home has lost the conversation: the same turn again, remote."""
        self._release(course)
        course.route, course.reason = Route.REMOTE, Reason.REFUSED_BY_WORKER
        course.prefill = self._prefill_of(course.judged)
        self._reserve(course, course.prefill, course.judged.remote_tokens)
        self._send(course, 0, now_ms)

    def _prefilled(self, course: _Course, job: Job, now_ms: float) -> None:
        talk = course.talk
        assert talk.home is not None
        assert course.prefill is not None
        held = self.cluster.engines[talk.home].cache.cached_tokens(talk.plan.session)
        course.cached_tokens = job.cached_tokens
        course.moved_tokens = talk.prompt_tokens - (held if self._delta else 0)
        arrived_ms = self.cluster.links[course.prefill].send(course.moved_tokens, now_ms)
        self.clock.at(arrived_ms + self._costs.serving.handover_ms, partial(self._join, course))

    def _join(self, course: _Course, now_ms: float) -> None:
        assert course.talk.home is not None
        self.cluster.engines[course.talk.home].submit(self._decoding(course, has_kv=True), now_ms)

    def _decoding(self, course: _Course, *, has_kv: bool) -> Job:
        talk = course.talk
        tokens = talk.plan.turns[talk.turn].out
        job = Job(talk.plan.session, talk.prompt_tokens, tokens, has_kv, lambda _: None)
        job.keeps_reply = not self._clients.replies_lost
        job.first = partial(self._spoke, course, job)
        job.done = partial(self._ended, course)
        return job

    def _spoke(self, course: _Course, job: Job, now_ms: float) -> None:
        course.first_ms = now_ms
        if course.route is not Route.REMOTE:
            course.cached_tokens = job.cached_tokens
        self._release(course)

    def _ended(self, course: _Course, now_ms: float) -> None:
        talk = course.talk
        plan, number = talk.plan, talk.turn + 1
        output_tokens = plan.turns[talk.turn].out
        assert talk.home is not None
        self.cluster.under_way[talk.home] -= 1
        ttft_ms = course.first_ms - course.at_ms
        e2e_ms = now_ms - course.at_ms
        tpot_ms = (now_ms - course.first_ms) / max(1, output_tokens - 1)
        failed = e2e_ms > self._clients.timeout_s * 1e3
        self._rows.append(
            TurnRow(
                plan.session,
                number,
                course.route,
                course.reason,
                course.at_ms / 1e3,
                ttft_ms,
                tpot_ms,
                e2e_ms,
                talk.prompt_tokens,
                output_tokens,
                course.cached_tokens,
                course.moved_tokens,
                failed,
            )
        )
        self._learn(course, output_tokens, ttft_ms, tpot_ms, now_ms / 1e3)
        if failed or number == len(plan.turns):
            self._leave(now_ms)
            return
        talk.prompt_tokens += output_tokens + plan.turns[number].new
        talk.turn = number
        pause_ms = plan.think_s[number - 1] * 1e3
        if plan.since_arrival:
            pause_ms = max(0.0, pause_ms - e2e_ms)
        if pause_ms:
            self._leave(now_ms)
            self._later(pause_ms, partial(self._arrive, talk))
        else:
            self._start(talk, now_ms, now_ms)

    def _learn(
        self, course: _Course, output_tokens: int, ttft_ms: float, tpot_ms: float, now_s: float
    ) -> None:
        talk, judged = course.talk, course.judged
        before = None if judged.hit is None else judged.hit.turn
        self._forecast.learn_reply("t", None, output_tokens)
        worker, tokens = course.prefill, talk.prompt_tokens
        if worker is None and before is not None:
            worker, tokens = before.prefill_worker, before.prefill_tokens
        assert talk.home is not None
        turn = Turn(
            session=talk.plan.session,
            number=talk.turn + 1,
            home=talk.home,
            prompt_tokens=talk.prompt_tokens,
            completion_tokens=output_tokens,
            prefill_worker=worker,
            prefill_tokens=0 if worker is None else tokens,
            usual_reply_tokens=blend(
                None if before is None else before.usual_reply_tokens, output_tokens
            ),
            loses_replies=self._clients.replies_lost,
        )
        after = None if judged.hit is None else judged.hit.digest
        self._index.record(_chain(talk.plan, talk.turn), turn, now_s, after)
        if judged.features is not None:
            self.planner.policy.observe(judged.features, course.route, ttft_ms, tpot_ms)

    def _leave(self, now_ms: float) -> None:
        """A connection is free: whoever waits longest takes it."""
        if self._queue:
            talk, since_ms = self._queue.popleft()
            self._start(talk, since_ms, now_ms)
        elif self._free is not None:
            self._free += 1

    def _prefill_of(self, judged: Judgement) -> str:
        worker = None if judged.hit is None else judged.hit.turn.prefill_worker
        taken = self.cluster.prefill(worker)
        assert taken is not None, "a remote turn in a cluster without prefill workers"
        return taken

    def _reserve(self, course: _Course, worker: str, tokens: int) -> None:
        course.reserved = worker, tokens
        self._backlog.add(worker, tokens)

    def _release(self, course: _Course) -> None:
        if course.reserved is not None:
            self._backlog.remove(*course.reserved)
            course.reserved = None

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
