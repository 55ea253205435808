"""What the router learns from a finished request: where its conversation is, what was true."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ppd.decision import Policy, Reason, Route, predicted_cached_tokens
from ppd.forecast import Forecast, blend
from ppd.journal import Finished
from ppd.sessions import Hit, SessionIndex, Turn

from ..seeing.counting import Observed
from ..seeing.journal import Journal
from ..seeing.metrics import Metrics, turn_label
from ..workers.worker import Worker
from .course import Course
from .sse import Usage

_MOST_WAITING = 0.1  # for the client, of the time of decoding, for a turn to be worth observing

# Local, but not because of what a worker was expected to hold.
_UNPREDICTED = (Reason.NO_PREFILL, Reason.APPENDED)

logger = logging.getLogger("ppd.router.turns")


class Ledger:
    """Writes the session index, the metrics and the log.

    Args:
        clock: seconds, monotonic.
        new_session: a fresh name for a conversation.
    """

    def __init__(
        self,
        *,
        index: SessionIndex,
        policy: Policy,
        forecast: Forecast,
        journal: Journal,
        metrics: Metrics,
        clock: Callable[[], float],
        new_session: Callable[[], int],
    ) -> None:
        self._index = index
        self._policy = policy
        self._since = 0
        self._forecast = forecast
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._new_session = new_session

    def take_up_policy(self, policy: Policy, since: int) -> None:
        """Another policy decides about requests from that number on; it learns of no others."""
        self._policy, self._since = policy, since

    def session(self, hit: Hit | None) -> int:
        """The number of a request's conversation, a new one where it has none."""
        return self._new_session() if hit is None else hit.turn.session

    def answered(self, course: Course) -> None:
        """A worker has spoken."""
        decision = course.decision
        metrics = self._metrics
        metrics.turns.add(course.inbound.endpoint, decision.route, decision.reason)
        metrics.ttft.of(*_kind(course)).observe(course.ttft_s)

    def finished(self, course: Course, outcome: str) -> None:
        """The request has ended; what comes after is not another end.

        A client may well hang up on the last byte, while the legs are still being closed.
        """
        if course.outcome is not None:
            return
        course.outcome = outcome
        if outcome == "ok":
            self._metrics.e2e.of(*_kind(course)).observe(self._clock() - course.arrived_s)
        self._metrics.finished.add(course.inbound.endpoint, outcome)

    def passing_on(self, course: Course) -> Observed:
        """For the times between the parts of a stream."""
        return self._metrics.itl.of(*_kind(course))

    def resumed(self, well: bool) -> None:
        """A stream whose worker was lost goes on elsewhere, or could not."""
        self._metrics.resumed.labels("ok" if well else "failed").inc()

    def closed(self, course: Course, outcome: str) -> None:
        """Nothing is left of the request: the decision log shall say how it ended."""
        if course.recorded:
            return
        course.recorded = True
        spoke = course.first_byte_s is not None
        self._journal.finished(
            Finished(
                number=course.number,
                at_s=self._clock(),
                route=course.decision.route,
                reason=course.decision.reason,
                outcome=outcome,
                ttft_ms=1e3 * course.ttft_s if spoke else None,
            )
        )

    def learn(self, course: Course, home: Worker, usage: Usage | None) -> None:
        """Remember where the conversation now is, and compare prediction and truth."""
        chain = course.inbound.chain
        course.usage = usage
        if usage is None or chain is None:
            return
        now_s = self._clock()
        turn = self._turn(course, home, usage)
        self._index.record(chain, turn, now_s, course.hit.digest if course.hit else None)
        for worker in (home, course.prefill):
            if worker is not None and worker.evictions is not None:
                worker.evictions.served(turn.session)
        if course.decision.route is Route.LOCAL and course.decision.reason not in _UNPREDICTED:
            self._compare(course, turn, usage)
        self._count_transfer(course, home, usage)
        self._forecast.learn_prompt(course.inbound.endpoint, chain.total_bytes, usage.prompt_tokens)
        predicted = course.features.output_tokens if course.features else None
        off = self._forecast.learn_reply(course.tenant, predicted, usage.completion_tokens)
        if off is not None:
            self._metrics.output_off.of().observe(off)
        self._observe(course, usage, now_s)
        if logger.isEnabledFor(logging.INFO):
            _log(course, turn, usage)

    def _count_transfer(self, course: Course, home: Worker, usage: Usage) -> None:
        token_bytes = home.handshake.kv_token_bytes
        if course.decision.route is Route.LOCAL:
            self._metrics.transfer_avoided.inc(usage.prompt_tokens)
            if token_bytes is not None:
                self._metrics.bytes_avoided.add(more=usage.prompt_tokens * token_bytes)
        elif course.prefill is not None and token_bytes is not None:
            features, held = course.features, 0
            if features is not None and course.hit is not None:
                there = course.hit.turn.home == home.identity
                held = min(features.held_tokens, usage.prompt_tokens) if there else 0
            self._metrics.bytes_sent.add(more=(usage.prompt_tokens - held) * token_bytes)

    def _observe(self, course: Course, usage: Usage, now_s: float) -> None:
        """Tell the policy, and the decision log, what the turn took.

        Of an answer that did not stream, came on another route than decided or had to wait for
        its client the policy learns nothing.
        """
        ttft_ms = 1e3 * course.ttft_s
        tpot_ms = None
        decoding_s = now_s - course.arrived_s - course.ttft_s
        if course.inbound.stream and usage.completion_tokens > 1:
            tpot_s = decoding_s / (usage.completion_tokens - 1)
            tpot_ms = 1e3 * tpot_s
            self._metrics.tpot.of(*_kind(course)).observe(tpot_s)
            self._metrics.decoded_for(max(0.0, decoding_s))
        observed = False
        if course.features is not None and tpot_ms is not None:
            as_decided = course.decision == course.judged.decision and not course.retried
            in_time = course.client_waits_s <= _MOST_WAITING * decoding_s
            observed = as_decided and in_time and course.number >= self._since
            if observed:
                self._policy.observe(course.features, course.decision.route, ttft_ms, tpot_ms)
        course.recorded = True
        self._journal.finished(
            Finished(
                number=course.number,
                at_s=now_s,
                route=course.decision.route,
                reason=course.decision.reason,
                outcome="answered",
                observed=observed,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
            )
        )

    def _turn(self, course: Course, home: Worker, usage: Usage) -> Turn:
        before = course.hit.turn if course.hit else None
        if course.prefill is not None:
            prefill_worker: str | None = course.prefill.identity
            prefill_tokens = usage.prompt_tokens
        elif before is not None:
            prefill_worker, prefill_tokens = before.prefill_worker, before.prefill_tokens
        else:
            prefill_worker, prefill_tokens = None, 0  # a replica's first turn
        return Turn(
            session=course.session,
            number=course.turn,
            home=home.identity,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_worker=prefill_worker,
            prefill_tokens=prefill_tokens,
            usual_reply_tokens=blend(
                before.usual_reply_tokens if before else None, usage.completion_tokens
            ),
            loses_replies=_loses_replies(course, home, usage),
        )

    def _compare(self, course: Course, turn: Turn, usage: Usage) -> None:
        assert course.features is not None
        # The last prompt token is always computed: its logits are the first new token.
        held = min(course.features.held_tokens, usage.prompt_tokens - 1)
        predicted = predicted_cached_tokens(held, course.features.page_size)
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


def _kind(course: Course) -> tuple[str, str, str]:
    decision = course.decision
    return decision.route, decision.reason, turn_label(course.turn)


def _loses_replies(course: Course, home: Worker, usage: Usage) -> bool:
    """Whether the engine found the earlier prompt cached, but not half of the reply after it."""
    hit, seen = course.hit, course.features
    if hit is None or seen is None or hit.bytes_after == 0 or hit.turn.home != home.identity:
        return False
    least = predicted_cached_tokens(
        hit.turn.prompt_tokens + hit.turn.completion_tokens // 2, seen.page_size
    )
    evicted = seen.evicted_tokens or usage.cached_tokens < seen.least_cached_tokens
    if evicted:  # that says nothing of replies
        return hit.turn.loses_replies
    return usage.cached_tokens < least


def _log(course: Course, turn: Turn, usage: Usage) -> None:
    fields: dict[str, object] = {
        "session": turn.session_name,
        "turn": turn.number,
        "route": course.decision.route,
        "reason": course.decision.reason,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": usage.completion_tokens,
        "ttft_ms": 1e3 * course.ttft_s,
    }
    seen = course.decision.assessment
    if seen is not None:  # what the table said
        fields |= {
            "cell": seen.cell,
            "ttft_saved": seen.score.ttft_saved,
            "tpot_lost": seen.score.tpot_lost,
            "score_remote": seen.score.remote,
            "score_local": seen.score.local,
        }
    logger.info("turn", extra={"fields": fields})
