"""What the router learns from a finished request: where its conversation is, what was true."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ppd.decision import Route, predicted_cached_tokens
from ppd.sessions import SessionIndex, Turn

from .course import Course
from .metrics import Metrics
from .sse import Usage
from .workers import Worker

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
        metrics: Metrics,
        clock: Callable[[], float],
        new_session: Callable[[], str],
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._new_session = new_session

    def answered(self, course: Course) -> None:
        """A worker has spoken."""
        decision = course.decision
        labels = (course.inbound.endpoint, decision.route, decision.reason)
        self._metrics.turns.labels(*labels).inc()
        self._metrics.ttft.labels(decision.route).observe(course.ttft_s)

    def finished(self, course: Course, outcome: str) -> None:
        """The request has ended; what comes after is not another end.

        A client may well hang up on the last byte, while the legs are still being closed.
        """
        if course.outcome is not None:
            return
        course.outcome = outcome
        self._metrics.finished.labels(course.inbound.endpoint, outcome).inc()

    def learn(self, course: Course, home: Worker, usage: Usage | None) -> None:
        """Remember where the conversation now is, and compare prediction and truth."""
        if usage is None or course.inbound.chain is None:
            return
        turn = self._turn(course, home, usage)
        self._index.record(course.inbound.chain, turn, self._clock())
        if course.decision.route is Route.LOCAL:
            self._compare(course, turn, usage)
        logger.info(
            "turn session=%s turn=%d route=%s reason=%s prompt=%d cached=%d completion=%d "
            "ttft_ms=%.1f",
            turn.session,
            turn.number,
            course.decision.route,
            course.decision.reason,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            1e3 * course.ttft_s,
        )

    def _turn(self, course: Course, home: Worker, usage: Usage) -> Turn:
        before = course.hit.turn if course.hit else None
        if course.prefill is not None:
            prefill_worker: str | None = course.prefill.identity
            prefill_tokens = usage.prompt_tokens
        else:
            assert before is not None, "a local turn continues a known one"
            prefill_worker, prefill_tokens = before.prefill_worker, before.prefill_tokens
        return Turn(
            session=before.session if before else self._new_session(),
            number=course.turn,
            home=home.identity,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_worker=prefill_worker,
            prefill_tokens=prefill_tokens,
        )

    def _compare(self, course: Course, turn: Turn, usage: Usage) -> None:
        assert course.features is not None
        # The last prompt token is always computed: its logits are the first new token.
        held = min(course.features.context_tokens, usage.prompt_tokens - 1)
        predicted = predicted_cached_tokens(held, course.features.page_size)
        self._metrics.cached_predicted.inc(predicted)
        self._metrics.cached_actual.inc(usage.cached_tokens)
        if usage.cached_tokens < predicted:
            self._metrics.cache_misses.inc()
            logger.warning(
                "cache misprediction session=%s turn=%d: predicted %d cached tokens, the engine "
                "found %d of %d (reply re-tokenized or edited, or KV evicted)",
                turn.session,
                turn.number,
                predicted,
                usage.cached_tokens,
                usage.prompt_tokens,
            )
