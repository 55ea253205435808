"""One turn judged: what is known of it, and the route that follows.

Brings together what the rest of ``ppd`` keeps (sessions, arrival rate, forecast, backlog)
with a view of the cluster, which the router and the simulator each give in their own way.
Judging a turn decides nothing for good: it only renews the conversation's place in the index.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.decision import Decision, Features, HomeState, Policy, Reason, Route, decide
from ppd.forecast import Forecast
from ppd.prefix import PrefixChain
from ppd.score import Objective
from ppd.sessions import Hit, SessionIndex

# What follows the known prefix is estimated from bytes. If it is so much less than the reply alone
# was, the reply has not come back whole: clients leave reasoning out.
_REPLY_IS_BACK = 0.7


class HomeView(msgspec.Struct, frozen=True):
    """A worker that lives and may hold a conversation.

    Attributes:
        takes_appends: it offers local turns.
        running: requests decoding there.
        free_tokens: KV left, evictable cache counted as free; None if it has not told.
        replica: it does both, prefill and decode.
    """

    takes_appends: bool
    page_size: int
    running: int
    free_tokens: int | None
    replica: bool = False


class ClusterView(Protocol):
    def home(self, identity: str) -> HomeView | None:
        """That worker, if it lives and has not restarted."""
        ...

    def evicted(self, identity: str | None, session: int) -> int:
        """Tokens that the worker is known to have dropped from the conversation's end."""
        ...

    def prefill(self, identity: str | None) -> str | None:
        """The prefill worker that a remote turn would take: that one, if it lives."""
        ...

    def opening(self, root: bytes | None) -> Route | None:
        """How a turn begins that nobody can continue; None: the policy says.

        Args:
            root: of its conversation.
        """
        ...

    @property
    def decode_workers(self) -> int: ...


class Query(msgspec.Struct, frozen=True):
    """A turn to be judged.

    Attributes:
        kind: of the request; bytes make tokens differently in each.
        chain: None if it holds several prompts.
        body_bytes: of the request as it came.
        max_reply_tokens: its own limit on the reply.
    """

    kind: str
    chain: PrefixChain | None
    body_bytes: int
    tenant: str
    max_reply_tokens: int | None
    objective: Objective


class Judgement(msgspec.Struct, frozen=True):
    """``remote_tokens``: what a remote turn adds to its prefill worker's queue, as far as known."""

    hit: Hit | None
    features: Features | None
    decision: Decision
    remote_tokens: int


class Planner:
    def __init__(
        self,
        *,
        policy: Policy,
        cluster: ClusterView,
        index: SessionIndex,
        arrivals: ArrivalRate,
        forecast: Forecast,
        backlog: Backlog,
    ) -> None:
        self.policy = policy
        self._cluster = cluster
        self._index = index
        self._arrivals = arrivals
        self._forecast = forecast
        self._backlog = backlog

    def kv_tokens(self, query: Query, prompts: int) -> int:
        """What a request will need on a decode worker, before anything is looked up.

        Args:
            prompts: that it holds; each gets a reply.
        """
        prompt_bytes = query.body_bytes if query.chain is None else query.chain.total_bytes
        reply = self._forecast.reply_tokens(query.tenant, None, query.max_reply_tokens)
        return self._forecast.prompt_tokens(query.kind, prompt_bytes) + reply * prompts

    def plan(self, query: Query, now_s: float) -> Judgement:
        if query.chain is None:
            route = self._cluster.opening(None) or self.policy.opening
            tokens = self._forecast.prompt_tokens("batch", query.body_bytes)
            return Judgement(None, None, Decision(route, Reason.BATCH), tokens)
        hit = self._index.find(query.chain, now_s)
        if hit is None:
            features = None
            remote_tokens = self._forecast.prompt_tokens(query.kind, query.chain.total_bytes)
        else:
            features = self._features(query, query.chain, hit, now_s)
            remote_tokens = features.uncached_at_prefill
        opening = self._cluster.opening(query.chain.root)
        decision = decide(features, self.policy, query.objective, opening)
        return Judgement(hit, features, decision, remote_tokens)

    def _features(self, query: Query, chain: PrefixChain, hit: Hit, now_s: float) -> Features:
        turn = hit.turn
        home = self._cluster.home(turn.home)
        if home is None:
            state, home = HomeState.GONE, HomeView(False, 1, 0, None)
        elif home.replica and self.policy.opening is not Route.REPLICA:
            state = HomeState.REPLICA
        elif home.replica or home.takes_appends:
            state = HomeState.READY
        else:
            state = HomeState.UNPATCHED
        prefill = self._cluster.prefill(turn.prefill_worker)
        # The conversation's own tokens per byte; what follows its prefix is the reply, then the
        # new turn.
        known_bytes = max(1, chain.total_bytes - hit.bytes_after)
        tokens_after = round(hit.bytes_after * turn.prompt_tokens / known_bytes)
        if hit.bytes_after == 0:  # the same input again: its last token is computed anew
            context_tokens, new_tokens = turn.prompt_tokens - 1, 1
        elif turn.loses_replies or tokens_after < _REPLY_IS_BACK * turn.completion_tokens:
            context_tokens, new_tokens = turn.prompt_tokens, tokens_after
        else:
            context_tokens, new_tokens = turn.kv_tokens, tokens_after - turn.completion_tokens
        held_tokens = max(0, turn.kv_tokens - self._cluster.evicted(turn.home, turn.session))
        prefill_cached = 0
        if prefill == turn.prefill_worker:
            evicted = self._cluster.evicted(prefill, turn.session)
            prefill_cached = max(0, turn.prefill_tokens - evicted)
        return Features(
            session=turn.session_name,
            turn=hit.next_turn,
            context_tokens=context_tokens,
            evicted_tokens=max(0, context_tokens - held_tokens),
            earlier_prompt_tokens=turn.prompt_tokens,
            new_tokens=max(1, new_tokens),
            output_tokens=self._forecast.reply_tokens(
                query.tenant, turn.usual_reply_tokens, query.max_reply_tokens
            ),
            prefill_cached_tokens=prefill_cached,
            prefill_queue_tokens=0 if prefill is None else self._backlog.of(prefill),
            qps=self._arrivals.per_second(now_s) / max(1, self._cluster.decode_workers),
            home=state,
            page_size=home.page_size,
            home_running=home.running,
            home_append_tokens=self._backlog.of(turn.home),
            home_free_tokens=home.free_tokens,
        )
