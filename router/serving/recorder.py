"""Records requests: session index, forecast, metrics, decision log, log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import structs

from ppd.decision import Reason, Route, predicted_cached_tokens
from ppd.forecast import Forecast, blend
from ppd.journal import Finished
from ppd.outcome import Outcome
from ppd.planning import Planner
from ppd.prefix import Digest, PrefixChain
from ppd.sessions import Hit, SessionIndex, Turn

from ..observability.counting import HistogramChild
from ..observability.journal import Journal
from ..observability.logs import log_fields
from ..observability.metrics import Metrics, turn_label
from ..workers.sglang import Usage
from ..workers.worker import Worker
from .context import RequestContext

_MAX_WAITING = 0.1  # share of decoding in which the client was waited for; above, TPOT is not used

# Local, but not because a worker was expected to hold the prefix.
_OK, _LOCAL = Outcome.OK, Route.LOCAL  # an enum's attribute is slow to look up (Python 3.11)
_UNPREDICTED = (Reason.NO_PREFILL, Reason.APPENDED)

logger = logging.getLogger("ppd.router.turns")


class RequestRecorder:
    """Records what became of requests.

    Args:
        clock: seconds, monotonic.
        new_session: a fresh name for a conversation.
        share: queues a finished turn for other routers: prefixes of its input, the turn, and the
            digest of the turn that it continued; None: nothing is shared.
    """

    def __init__(
        self,
        *,
        index: SessionIndex,
        planner: Planner,
        forecast: Forecast,
        journal: Journal,
        metrics: Metrics,
        clock: Callable[[], float],
        new_session: Callable[[], int],
        share: Callable[[PrefixChain, Turn, Digest | None], None] | None = None,
    ) -> None:
        self._index = index
        self._planner = planner
        self._forecast = forecast
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._new_session = new_session
        self._share = share

    def session(self, hit: Hit | None) -> int:
        """The number of a request's conversation, a new one where it has none."""
        return self._new_session() if hit is None else hit.turn.session

    def answered(self, context: RequestContext) -> None:
        """A worker has begun to answer."""
        decision, ttft_s = context.decision, context.ttft_s
        metrics = self._metrics
        metrics.turns.add(context.inbound.endpoint, decision.route, decision.reason)
        if ttft_s is not None:
            metrics.ttft.of(*_kind(context)).observe(ttft_s)

    def finished(self, context: RequestContext, outcome: Outcome) -> None:
        """The request has ended; each further call does nothing.

        A client may well close its connection on the last byte, while legs are being closed.
        """
        if context.outcome is not None:
            return
        context.outcome = outcome
        if outcome is _OK:
            self._metrics.e2e.of(*_kind(context)).observe(self._clock() - context.arrived_s)
        self._metrics.finished.add(context.inbound.endpoint, outcome)

    def itl(self, context: RequestContext) -> HistogramChild:
        """The histogram for the times between the parts of a stream."""
        return self._metrics.itl.of(*_kind(context))

    def resumed(self, well: bool) -> None:
        """A stream whose worker was lost goes on on another one, or could not."""
        self._metrics.resumed.labels("ok" if well else "failed").inc()

    def recorded(self, context: RequestContext) -> None:
        """Nothing of the request is left: write its end to the decision log, if it is not there."""
        if context.recorded:
            return
        context.recorded = True
        ttft_s = context.ttft_s
        self._journal.finished(
            Finished(
                number=context.number,
                at_s=self._clock(),
                route=context.decision.route,
                reason=context.decision.reason,
                outcome=context.outcome or Outcome.INTERNAL_ERROR,
                ttft_ms=None if ttft_s is None else 1e3 * ttft_s,
            )
        )

    def record_answer(self, context: RequestContext, home: Worker, usage: Usage | None) -> None:
        """Record where the conversation now is, and compare prediction and usage."""
        chain, decision = context.inbound.chain, context.decision
        context.usage = usage
        if usage is None or chain is None:
            return
        now_s = self._clock()
        turn = self._turn(context, home, usage)
        after = context.hit.digest if context.hit else None
        self._index.record(chain, turn, now_s, after)
        if self._share is not None:
            self._share(chain, turn, after)
        for worker in (home, context.prefill):
            if isinstance(worker, Worker) and worker.evictions is not None:
                worker.evictions.served(turn.session)
        if decision.route is _LOCAL and decision.reason not in _UNPREDICTED:
            self._compare(context, turn, home, usage)
        self._count_transfer(context, home, usage)
        inbound, prompt_tokens = context.inbound, usage.prompt_tokens
        self._forecast.learn_prompt(inbound.kind, chain.total_bytes, prompt_tokens, inbound.media)
        predicted = context.features.output_tokens if context.features else None
        off = self._forecast.learn_reply(context.tenant, predicted, usage.completion_tokens)
        if off is not None:
            self._metrics.output_off.of().observe(off)
        self._observe(context, usage, now_s)
        if logger.isEnabledFor(logging.INFO):
            _log(context, turn, usage)

    def _count_transfer(self, context: RequestContext, home: Worker, usage: Usage) -> None:
        token_bytes = home.handshake.kv_token_bytes
        if context.decision.route is _LOCAL:
            self._metrics.transfer_avoided.inc(usage.prompt_tokens)
            if token_bytes is not None:
                self._metrics.bytes_avoided.add(more=usage.prompt_tokens * token_bytes)
        elif context.prefill is not None and token_bytes is not None:
            features, held = context.features, 0
            if features is not None and context.hit is not None:
                there = context.hit.turn.home == home.identity
                held = min(features.held_tokens, usage.prompt_tokens) if there else 0
            self._metrics.bytes_sent.add(more=(usage.prompt_tokens - held) * token_bytes)

    def _observe(self, context: RequestContext, usage: Usage, now_s: float) -> None:
        """Give the policy and the decision log what the turn took.

        The policy gets nothing of an answer that was sent to other workers than planned, or waited
        for its client; of an answer that did not stream it gets the route alone.
        """
        decision, ttft_s = context.decision, context.ttft_s
        ttft_ms = None if ttft_s is None else 1e3 * ttft_s
        tpot_ms = None
        observed, in_time = False, True
        if ttft_s is not None and ttft_ms is not None and usage.completion_tokens > 1:
            decoding_s = now_s - context.arrived_s - ttft_s
            tpot_s = decoding_s / (usage.completion_tokens - 1)
            tpot_ms = 1e3 * tpot_s
            self._metrics.tpot.of(*_kind(context)).observe(tpot_s)
            self._metrics.decoded(usage.completion_tokens - 1, max(0.0, decoding_s))
            in_time = context.client_waits_s <= _MAX_WAITING * decoding_s
        finished = Finished(
            number=context.number,
            at_s=now_s,
            route=decision.route,
            reason=decision.reason,
            outcome="answered",
            at_home=context.at_home,
            waited_ms=1e3 * (context.decided_s - context.arrived_s),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
        )
        as_planned = context.attempts.plan is context.planned.plan
        if context.features is not None and as_planned and in_time:
            observed = self._planner.observe(
                context.number, context.features, decision.route, *finished.policy_times()
            )
        context.recorded = True
        self._journal.finished(structs.replace(finished, observed=observed))

    def _turn(self, context: RequestContext, home: Worker, usage: Usage) -> Turn:
        before = context.hit.turn if context.hit else None
        if context.prefill is not None:
            prefill_worker: str | None = context.prefill.identity
            prefill_tokens = usage.prompt_tokens
        elif before is not None:
            prefill_worker, prefill_tokens = before.prefill_worker, before.prefill_tokens
        else:
            prefill_worker, prefill_tokens = None, 0  # a replica's first turn
        return Turn(
            session=context.session,
            number=context.turn,
            home=home.identity,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_worker=prefill_worker,
            prefill_tokens=prefill_tokens,
            usual_reply_tokens=blend(
                before.usual_reply_tokens if before else None, usage.completion_tokens
            ),
            loses_replies=_loses_replies(context, home, usage),
        )

    def _compare(self, context: RequestContext, turn: Turn, home: Worker, usage: Usage) -> None:
        assert context.features is not None
        # The last prompt token is always computed: its logits are the first new token.
        held = min(context.features.held_tokens, usage.prompt_tokens - 1)
        found = max(0, held - home.handshake.cache_slack_tokens)
        predicted = predicted_cached_tokens(found, context.features.page_size)
        self._metrics.cached_predicted.inc(predicted)
        self._metrics.cached_actual.inc(usage.cached_tokens)
        if usage.cached_tokens < predicted:
            self._metrics.cache_misses.inc()
            logger.warning(
                "cache misprediction session=%s turn=%d: predicted %d cached tokens, the engine "
                "found %d of %d (reply re-tokenized or edited, or KV evicted)",
                turn.session_name,
                turn.number,
                predicted,
                usage.cached_tokens,
                usage.prompt_tokens,
            )


def _kind(context: RequestContext) -> tuple[str, str, str]:
    decision = context.decision
    return decision.route, decision.reason, turn_label(context.turn)


def _loses_replies(context: RequestContext, home: Worker, usage: Usage) -> bool:
    """Whether the engine found the earlier prompt cached, but not half of the reply after it."""
    hit, seen = context.hit, context.features
    if hit is None or seen is None:
        return False
    if hit.bytes_after == 0 or hit.turn.home != home.identity:  # no reply could be found there
        return hit.turn.loses_replies
    half = hit.turn.prompt_tokens + hit.turn.completion_tokens // 2
    least = predicted_cached_tokens(
        max(0, half - home.handshake.cache_slack_tokens), seen.page_size
    )
    evicted = seen.evicted_tokens or usage.cached_tokens < seen.min_cached_tokens
    if evicted:  # which is no evidence about replies
        return hit.turn.loses_replies
    return usage.cached_tokens < least


def _log(context: RequestContext, turn: Turn, usage: Usage) -> None:
    fields: dict[str, object] = {
        "session": turn.session_name,
        "turn": turn.number,
        "route": context.decision.route,
        "reason": context.decision.reason,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": usage.completion_tokens,
    }
    if context.ttft_s is not None:
        fields["ttft_ms"] = 1e3 * context.ttft_s
    seen = context.decision.assessment
    if seen is not None:  # costs of the table
        fields |= {
            "cell": seen.cell,
            "ttft_saved": seen.score.ttft_saved,
            "tpot_lost": seen.score.tpot_lost,
            "throughput_gained": seen.score.throughput_gained,
            "score_remote": seen.score.remote,
            "score_local": seen.score.local,
        }
    log_fields(logger, "turn", fields)
