"""A simulated cluster under load, routed by the real ``ppd.planning.Planner`` and its policies.

Owns the clients: which turn comes when, and what is recorded of it. A turn's attempts are
``handler``'s, a worker's steps ``engine``'s, what a step takes ``cost_model``'s.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from ppd.arrivals import ArrivalRate
from ppd.attempts import Attempts
from ppd.backlog import Backlog
from ppd.choice import ByLoad
from ppd.decision import Policy
from ppd.forecast import Forecast, blend
from ppd.outcome import Outcome
from ppd.placement import Chooser, Placement
from ppd.planning import Planner, Query
from ppd.prefix import MessageChain
from ppd.score import Objective, Weights
from ppd.sessions import SessionIndex, Turn
from ppd.shared import SharedPrefixes

from .by_hash import ByHash
from .cache import HostMemory
from .clock import Clock
from .cost_model import Costs
from .handler import PROBE_INTERVAL_S, SimulatedHandler, SimulatedRequest
from .outages import Outage, check
from .rows import Result, TurnRow
from .traffic import Clients, Conversation
from .workers import Chunking, Cluster, PlacementRule, Shape

_BYTES_PER_TOKEN = 4  # exactly: the planner estimates tokens from bytes


@dataclass(slots=True, eq=False)
class _Dialogue:
    """A conversation under way."""

    plan: Conversation
    root: bytes
    turn: int  # from 0
    prompt_tokens: int  # of the turn
    chain: MessageChain  # of the turn


class Simulation:
    """One run.

    Args:
        delta: only the KV that the decode worker does not hold is transferred.
        outages: of its workers.
        max_resumptions: of a stream whose worker has died.
        host: memory for KV on the host of each worker.
        kv_events: workers publish their evictions, which the router gets without delay.

    Raises:
        ConfigError: an outage names no worker of the cluster, or two of one worker overlap.
    """

    def __init__(
        self,
        costs: Costs,
        shape: Shape,
        policy: Policy,
        clients: Clients,
        seed: int,
        *,
        objective: Objective | None = None,
        delta: bool = False,
        chunking: Chunking | None = None,
        placement: PlacementRule = PlacementRule.CHANCE,
        outages: Sequence[Outage] = (),
        max_resumptions: int = 0,
        host: HostMemory | None = None,
        kv_events: bool = False,
    ) -> None:
        self.clock = Clock()
        source = random.Random(seed)
        chunking = chunking or Chunking()
        self.cluster = Cluster(
            costs, shape, self.clock.at, source, chunking, placement, host, kv_events=kv_events
        )
        self._index = SessionIndex(capacity=1_000_000, ttl_s=1e9)
        self._arrivals, self._forecast = ArrivalRate(), Forecast()
        self.backlog = Backlog(lambda: self.clock.now_ms / 1e3)
        self._numbers = count(1)
        chooser: Chooser | None = None
        if placement is PlacementRule.ROUTER_LOAD:
            chooser = ByLoad(self.cluster, self.backlog)
        elif placement is PlacementRule.ROUTER_HASH:
            chooser = ByHash(self.cluster)
        self.planner = Planner(
            policy=policy,
            placement=Placement(self.cluster, decode_fallback=False, chooser=chooser),
            index=self._index,
            arrivals=self._arrivals,
            forecast=self._forecast,
            backlog=self.backlog,
            shared=SharedPrefixes() if placement is PlacementRule.ROUTER_LOAD else None,
        )
        self._clients = clients
        self._objective: Objective = objective or Weights()
        self._max_resumptions = max_resumptions
        self._handler = SimulatedHandler(
            costs,
            self.cluster,
            self.clock,
            delta=delta,
            keeps_replies=not clients.replies_lost,
            ended=self._end,
        )
        check(outages)
        for outage in outages:
            self._handler.schedule(outage)
        self._free = clients.connections
        self._queue: deque[tuple[_Dialogue, float]] = deque()
        self._dialogues: dict[SimulatedRequest, _Dialogue] = {}  # under way
        self._rows: list[TurnRow] = []
        self._ended_ms = 0.0
        self._reported_s = -PROBE_INTERVAL_S

    def run(self, conversations: Iterable[Conversation]) -> Result:
        for plan in conversations:
            chain = _next_chain(plan, 0, None)
            dialogue = _Dialogue(plan, b"%d" % plan.session, 0, plan.turns[0].new, chain)
            self.clock.at(plan.at_s * 1e3, partial(self._arrive, dialogue))
        self.clock.run()
        return Result(
            rows=self._rows,
            ended_s=self._ended_ms / 1e3,
            moved_tokens=sum(link.moved_tokens for link in self.cluster.links.values()),
            evicted_tokens=sum(one.all_evicted_tokens for one in self.cluster.workers.values()),
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
        chain = dialogue.chain
        tokens = plan.turns[dialogue.turn].out
        # Its limit is no forecast: clients name one that is far beyond the reply, or none.
        query = Query("chat", chain, chain.total_bytes, "t", None, self._objective, root)
        self.cluster.assign(root, plan.session)
        self._report(now_s)
        planned = self.planner.plan(query, self.planner.kv_tokens(query), now_s)
        self.planner.sent(query, planned, now_s)
        attempts = Attempts(
            planned,
            self.planner.placement,
            self.backlog,
            number=next(self._numbers),
            max_resumptions=self._max_resumptions,
        )
        request = SimulatedRequest(
            plan.session, dialogue.prompt_tokens, tokens, planned, attempts, clock_ms
        )
        request.shared = plan.shared
        self._dialogues[request] = dialogue
        self._handler.start(request, now_ms)

    def _report(self, now_s: float) -> None:
        """Have decode workers report their free KV, as often as the router requests it."""
        if now_s >= self._reported_s + PROBE_INTERVAL_S:
            self._reported_s = now_s
            for worker in self.cluster.homes:
                worker.headroom.report(worker.free_tokens)

    def _end(self, request: SimulatedRequest, now_ms: float) -> None:
        """A request has ended: record it, and begin the next turn."""
        dialogue = self._dialogues.pop(request)
        plan, number = dialogue.plan, dialogue.turn + 1
        outcome = request.attempts.outcome
        assert outcome is not None
        ttft_ms = request.first_ms - request.at_ms
        e2e_ms = now_ms - request.at_ms
        tpot_ms = (now_ms - request.first_ms) / max(1, request.output_tokens - 1)
        failed = outcome is not Outcome.OK or e2e_ms > self._clients.timeout_s * 1e3
        decision = request.attempts.decision
        self._rows.append(
            TurnRow(
                plan.session,
                number,
                decision.route,
                decision.reason,
                request.at_ms / 1e3,
                ttft_ms,
                tpot_ms,
                e2e_ms,
                request.prompt_tokens,
                request.output_tokens,
                request.cached_tokens,
                request.moved_tokens,
                failed,
                outcome,
            )
        )
        self._ended_ms = now_ms
        if outcome is Outcome.OK:
            self._learn(dialogue, request, ttft_ms, tpot_ms, now_ms / 1e3)
        if failed or number == len(plan.turns):
            self._leave(now_ms)
            return
        if plan.turns[number].drops_reply:
            for worker in self.cluster.workers.values():
                worker.engine.cache.cut(plan.session, dialogue.prompt_tokens)
        else:
            dialogue.prompt_tokens += request.output_tokens
        dialogue.prompt_tokens += plan.turns[number].new
        dialogue.turn = number
        dialogue.chain = _next_chain(plan, number, dialogue.chain)
        pause_ms = plan.think_s[number - 1] * 1e3
        if plan.since_arrival:
            pause_ms = max(0.0, pause_ms - e2e_ms)
        if pause_ms:
            self._leave(now_ms)
            self.clock.at(now_ms + pause_ms, partial(self._arrive, dialogue))
        else:
            self._start(dialogue, now_ms, now_ms)

    def _learn(
        self,
        dialogue: _Dialogue,
        request: SimulatedRequest,
        ttft_ms: float,
        tpot_ms: float,
        now_s: float,
    ) -> None:
        planned, output_tokens = request.planned, request.output_tokens
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
            loses_replies=self._clients.replies_lost
            or dialogue.plan.turns[dialogue.turn].drops_reply,
        )
        after = None if planned.hit is None else planned.hit.digest
        self._index.record(dialogue.chain, turn, now_s, after)
        if planned.features is not None:
            plan, hit = request.plan, planned.hit
            at_home = hit is not None and plan.decode.identity == hit.turn.home
            self.planner.policy.observe(
                planned.features, plan.route, ttft_ms, tpot_ms if at_home else None
            )

    def _leave(self, now_ms: float) -> None:
        """A connection is free: the turn that has waited longest takes it."""
        if self._queue:
            dialogue, since_ms = self._queue.popleft()
            self._start(dialogue, since_ms, now_ms)
        elif self._free is not None:
            self._free += 1


def _next_chain(plan: Conversation, number: int, before: MessageChain | None) -> MessageChain:
    """A chat as the router hashes it, its text left out: a boundary after each message.

    Args:
        number: of the turn, from 0.
        before: that of the turn before.
    """
    digests: list[bytes] = []
    sizes: list[int] = []
    opening = size = 0
    if before is not None:
        opening, size = before.opening, before.total_bytes
        if not plan.turns[number].drops_reply:
            size += plan.turns[number - 1].out * _BYTES_PER_TOKEN
            digests.append(b"%d/%d/1" % (plan.session, number - 1))
            sizes.append(size)
    elif plan.shared is not None:  # a system prompt, which the first turn has
        digests.append(b"shared/%d" % plan.shared.number)
        sizes.append(plan.shared.tokens * _BYTES_PER_TOKEN)
        opening = 1
    digests.append(b"%d/%d/0" % (plan.session, number))
    sizes.append(size + plan.turns[number].new * _BYTES_PER_TOKEN)
    known = ((), ()) if before is None else (before.digests, before.sizes)
    return MessageChain((*known[0], *digests), (*known[1], *sizes), opening)
