"""Plans a turn: what is known of it, the route that follows, and the workers that serve it.

Brings together what the rest of ``ppd`` keeps (sessions, arrival rate, forecast, backlog) with a
view of the cluster, which the router and the simulator each give in their own way. Planning sends
nothing and reserves nothing: it only renews the conversation's place in the session index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.contract import Role
from ppd.decision import Decision, Features, HomeState, Policy, Reason, Route, decide
from ppd.errors import WorkerError
from ppd.forecast import Forecast, further_tokens
from ppd.media import Media
from ppd.placement import Placement, PlannedTurn, WorkerView
from ppd.prefix import PrefixChain
from ppd.score import Objective
from ppd.sessions import Hit, SessionIndex
from ppd.shared import SharedPrefixes
from ppd.shared_load import SharedLoad

# What follows the known prefix is estimated from bytes. If it is so much less than the reply alone
# was, the reply has not come back whole: clients leave reasoning out.
_REPLY_IS_BACK = 0.7


class Query(msgspec.Struct, frozen=True):
    """A turn to be planned.

    Attributes:
        kind: of the request; bytes make tokens differently in each.
        chain: prefixes of its input; None if it holds several prompts.
        body_bytes: of the request as it came, without its media.
        max_reply_tokens: its own limit on the reply.
        root: names the conversation for placement; None for several prompts.
        prompts: how many prompts it holds.
        media: of all of its prompts.
    """

    kind: str
    chain: PrefixChain | None
    body_bytes: int
    tenant: str
    max_reply_tokens: int | None
    objective: Objective
    root: bytes | None = None
    prompts: int = 1
    media: tuple[Media, ...] = ()


class Planner:
    """Plans turns of one cluster by one policy, which it alone holds.

    Args:
        shared: prefixes that conversations share; None: none are followed.
        loads: tokens of several routers; None: ``backlog`` has all there are.
        processes: which share the requests evenly, if ``loads`` does not count them.

    Attributes:
        policy: the one in force.
        placement: names the workers.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        placement: Placement,
        index: SessionIndex,
        arrivals: ArrivalRate,
        forecast: Forecast,
        backlog: Backlog,
        shared: SharedPrefixes | None = None,
        loads: SharedLoad | None = None,
        processes: int = 1,
    ) -> None:
        self.policy = policy
        self._since = 0  # the first request that it decides
        self.placement = placement
        self._cluster = placement.cluster
        self._index = index
        self._arrivals = arrivals
        self._forecast = forecast
        self._backlog = backlog
        self._shared = shared
        self._loads = loads
        self._processes = processes

    def qps(self, now_s: float) -> float:
        """Turns a second for each decode worker, as decisions use it.

        Of several routers each gets as many, as far as this one can tell.
        """
        routers = self._processes if self._loads is None else self._loads.routers
        return routers * self._arrivals.per_second(now_s) / max(1, self._cluster.decode_workers)

    def replace_policy(self, policy: Policy, since: int) -> None:
        """Decide by another policy from request number ``since`` on; it observes no earlier one."""
        self.policy, self._since = policy, since

    def observe(
        self,
        number: int,
        features: Features,
        route: Route,
        ttft_ms: float | None,
        tpot_ms: float | None,
    ) -> bool:
        """Give the policy what a turn took on the route that was decided for it.

        Returns:
            Whether it was this policy that decided about request ``number``.
        """
        if number < self._since:
            return False
        self.policy.observe(features, route, ttft_ms, tpot_ms)
        return True

    def kv_tokens(self, query: Query) -> int:
        """Tokens of KV that a request will need on a decode worker, before any look-up."""
        prompt_bytes = query.body_bytes if query.chain is None else query.chain.total_bytes
        reply = self._forecast.reply_tokens(query.tenant, None, query.max_reply_tokens)
        prompt = self._forecast.prompt_tokens(query.kind, prompt_bytes, query.media)
        return prompt + reply * query.prompts

    def plan(self, query: Query, kv_tokens: int, now_s: float) -> PlannedTurn:
        """Decide a turn's route and name its workers.

        Args:
            query: the turn.
            kv_tokens: as ``kv_tokens`` gave them.
            now_s: monotonic.
        """
        turn = self._decide(query, kv_tokens, now_s)
        try:
            turn.plan = self.placement.plan(turn, turn.decision)
        except WorkerError:  # it is raised again when the plan is to be carried out
            turn.plan = None
        return turn

    def sent(self, query: Query, planned: PlannedTurn, now_s: float) -> None:
        """Record that a turn is sent to the workers of its plan, which will hold its prefixes."""
        if self._shared is None or planned.hit is not None or planned.plan is None:
            return
        if (chain := query.chain) is not None:
            workers = [worker.identity for worker in planned.plan.workers]
            self._shared.record(chain, workers, now_s)

    def _decide(self, query: Query, kv_tokens: int, now_s: float) -> PlannedTurn:
        chain = query.chain
        if chain is None:
            route = self._cluster.opening(None) or self.policy.opening
            tokens = self._forecast.prompt_tokens("batch", query.body_bytes, query.media)
            decision = Decision(route, Reason.BATCH)
            turn = PlannedTurn(None, None, decision, tokens, kv_tokens, None, False, None)
            if (times := self.policy.prefill_times) is not None:
                turn.times = replace(times, attention_ms=0.0)  # each attends to itself
            return turn
        hit = self._index.find(chain, now_s)
        features = prefill = None
        if hit is None:
            total_bytes = chain.total_bytes
            remote_tokens = self._forecast.prompt_tokens(query.kind, total_bytes, query.media)
        else:
            before = self._cluster.find(hit.turn.prefill_worker)
            prefill = self._cluster.place(Role.PREFILL, before, (), 0, query.root)
            features = self._features(query, chain, hit, prefill, now_s)
            remote_tokens = features.uncached_at_prefill
        opening = self._cluster.opening(query.root)
        decision = decide(features, self.policy, query.objective, opening)
        turn = PlannedTurn(
            hit,
            features,
            decision,
            remote_tokens,
            kv_tokens,
            query.root,
            True,
            prefill,
            times=self.policy.prefill_times,
        )
        if hit is None and self._shared is not None:
            turn.held = self._held(self._shared.find(chain, now_s), query.kind)
        return turn

    def _held(self, found: Mapping[str, int], kind: str) -> Mapping[str, int]:
        """Tokens of the bytes that workers hold."""
        if not found:
            return found
        tokens_of = self._forecast.prompt_tokens
        return {worker: tokens_of(kind, size) for worker, size in found.items()}

    def _features(
        self,
        query: Query,
        chain: PrefixChain,
        hit: Hit,
        prefill: WorkerView | None,
        now_s: float,
    ) -> Features:
        turn = hit.turn
        home = self._cluster.find(turn.home)
        # What follows the prefix is the reply, then the new turn. Text has the conversation's own
        # tokens per byte, unless some of those tokens are of media.
        if len(query.media) > len(hit.media_after):
            tokens_after = self._forecast.prompt_tokens(query.kind, hit.bytes_after)
        else:
            known_bytes = chain.total_bytes - hit.bytes_after
            tokens_after = further_tokens(hit.bytes_after, turn.prompt_tokens, known_bytes)
        media_after = self._forecast.media_tokens(hit.media_after) if hit.media_after else 0
        if hit.bytes_after == 0:  # the same input again: its last token is computed anew
            context_tokens, new_tokens = turn.prompt_tokens - 1, 1
        elif turn.loses_replies or tokens_after < _REPLY_IS_BACK * turn.completion_tokens:
            context_tokens, new_tokens = turn.prompt_tokens, tokens_after
        else:
            context_tokens, new_tokens = turn.kv_tokens, tokens_after - turn.completion_tokens
        new_tokens = max(1, new_tokens) + media_after
        dropped_tokens = 0 if home is None else home.evicted_tokens(turn.session)
        held_tokens = max(0, turn.kv_tokens - dropped_tokens)
        queued = self._backlog.of if self._loads is None else self._loads.of
        prefill_cached = 0
        if prefill is not None and prefill.identity == turn.prefill_worker:
            prefill_cached = max(0, turn.prefill_tokens - prefill.evicted_tokens(turn.session))
        return Features(
            session=turn.session_name,
            turn=hit.next_turn,
            context_tokens=context_tokens,
            evicted_tokens=max(0, context_tokens - held_tokens),
            earlier_prompt_tokens=turn.prompt_tokens,
            new_tokens=new_tokens,
            output_tokens=self._forecast.reply_tokens(
                query.tenant, turn.usual_reply_tokens, query.max_reply_tokens
            ),
            prefill_cached_tokens=prefill_cached,
            prefill_queue_tokens=0 if prefill is None else queued(prefill.identity),
            prefill_wait_ms=self._wait_ms(prefill, prefill_cached, context_tokens + new_tokens),
            qps=self.qps(now_s),
            home=self._state(home),
            page_size=1 if home is None else home.page_size,
            home_running=0 if home is None else home.running,
            home_append_tokens=queued(turn.home),
            home_claimed_tokens=0 if self._loads is None else self._loads.claimed(turn.home, now_s),
            home_free_tokens=self._free_tokens(home),
            has_media=bool(query.media),
            has_prefill=prefill is not None,
        )

    def _free_tokens(self, home: WorkerView | None) -> int | None:
        """KV that a home has left now; its appends are features of their own.

        What prefill workers still compute for it would come later, wherever this turn goes.
        """
        if home is None or (unused := home.headroom.unused_tokens) is None:
            return None
        return unused + self._backlog.of(home.identity)

    def _wait_ms(
        self, prefill: WorkerView | None, cached_tokens: int, prompt_tokens: int
    ) -> float | None:
        """How long a remote turn waits; tokens of other routers take as long as its own would."""
        times = self.policy.prefill_times
        if prefill is None or times is None:
            return None
        cached_tokens = min(cached_tokens, prompt_tokens - 1)
        compute_ms = times.compute_ms(cached_tokens, prompt_tokens - cached_tokens)
        wait_ms = self._backlog.wait_ms(prefill.identity, compute_ms)
        if self._loads is not None:
            others = self._loads.of(prefill.identity) - self._backlog.of(prefill.identity)
            wait_ms += others * times.compute_ms(0, prompt_tokens) / prompt_tokens
        return wait_ms

    def _state(self, home: WorkerView | None) -> HomeState:
        if home is None:
            return HomeState.GONE
        if home.role is Role.REPLICA:
            replica_policy = self.policy.opening is Route.REPLICA
            return HomeState.READY if replica_policy else HomeState.REPLICA
        return HomeState.READY if home.takes_appends else HomeState.UNPATCHED
