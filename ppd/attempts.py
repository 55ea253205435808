"""What is done for one request, and what after each failure: a state machine without I/O.

Events come in (a leg has answered, a stream broke off, the client is gone), one effect goes out
(send this plan, probe that worker, relay the answer, finish). Every rule of "when something fails"
is in this file: which failure is held against which worker, whether the request is sent again, to
which workers, and how it ends. The router performs the effects over sockets
(``router/serving/handler.py``), the simulator over simulated engines.

The life of a request::

    start -> Send -> Answered -> Relay -> StreamEnded -> Finish

    Send    -> Failed, PrefillFailed -> Abandon -> Settled -> Send (other workers), or Finish
    Send    -> Failed (a refused local turn) -> Abandon -> Settled -> Send (a remote turn)
    Relay   -> StreamBroke -> Abandon -> Settled -> Send (the rest of the reply), or Finish
    Relay   -> PassageFound -> Prime -> Primed -> Append -> Answered -> Relay
    any     -> ClientGone, Stopping, Crashed -> Finish

A remote turn has two legs; ``Prefilled`` or ``PrefillFailed`` may come at any time until its legs
are closed.

A request holds two things while it is served: its tokens in the backlog of the worker that
prefills it, and its KV in the headroom of the worker that decodes it. Both are taken when a plan
is sent, and given back by this machine, whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

from ppd.backlog import Backlog, Queued
from ppd.decision import Decision, Reason, Route
from ppd.effects import (
    Abandon,
    Answered,
    Append,
    Cause,
    ClientGone,
    Crashed,
    Effect,
    Event,
    Failed,
    Failure,
    Finish,
    Note,
    PassageFound,
    Prefilled,
    PrefillFailed,
    Prime,
    Primed,
    Relay,
    Send,
    Settled,
    Stopping,
    StreamBroke,
    StreamEnded,
    StreamFailed,
)
from ppd.errors import EngineError, PpdError, WorkerError
from ppd.headroom import Headroom
from ppd.outcome import Outcome
from ppd.placement import Placement, Plan, PlannedTurn, WorkerView

# Members that every request passes have names of their own: an enum's attribute is slow to look
# up (Python 3.11).
_OK = Outcome.OK

# -- failures -----------------------------------------------------------------------------


def blames_worker(failure: Failure) -> bool:
    """Whether a failure counts against the worker.

    Not if the worker is only busy, or the client or the other worker may be at fault.
    """
    match failure.cause:
        case Cause.ANSWERED:
            return failure.error.status >= 500 and failure.error.status != 503
        case Cause.TRANSFER:
            return False
        case Cause.UNCONNECTED | Cause.LOST | Cause.SILENT:
            return True
        case _:
            assert_never(failure.cause)


_NO_KV = Failure(
    Cause.SILENT,
    EngineError("prefill worker did not answer, and no KV came from it", status=504),
)


_NO_STREAM = Failure(
    Cause.ANSWERED, EngineError("the rest of a stream did not come as a stream", status=502)
)


_NO_EFFECT = Note()  # of an event that changes nothing


# -- the machine --------------------------------------------------------------------------


class _Phase(StrEnum):
    IDLE = "idle"
    WAITING = "waiting"  # for an answer
    ABANDONING = "abandoning"
    RELAYING = "relaying"
    ENDED = "ended"


_IDLE, _WAITING, _ABANDONING, _RELAYING, _ENDED = _Phase


class _Part(StrEnum):
    """What of the reply is asked for."""

    WHOLE = "whole"
    REST = "rest"  # of a stream whose worker was lost
    WITH_PASSAGE = "with_passage"  # the rest, behind a passage
    WITHOUT_PASSAGE = "without_passage"  # the rest, the passage given up


_WHOLE = _Part.WHOLE


class Attempts:
    """The attempts at one request.

    Args:
        number: of the request; its KV is reserved under it.
        max_resumptions: how often another worker may be asked for the rest of a stream.

    Attributes:
        plan: of the latest attempt; None before the first.
        decision: as the latest attempt carries it out, or as the next one shall.
        prefill: the prefill worker of the attempt that was answered; None if it had none.
        failed: workers that have failed the request.
        retried: the request was sent once more after a worker had it.
        sees_prefill: an event comes when a prefill worker has done its part. Else it comes with a
            whole answer's end, and the turn leaves the worker's queue by its plan.
        answered_at_s: when the first answer began; None before.
        outcome: None until the request has ended.
    """

    __slots__ = (
        "_backlog",
        "_failure",
        "_headroom",
        "_number",
        "_part",
        "_phase",
        "_placement",
        "_prefilled",
        "_queued",
        "_resumptions",
        "_stream_worker",
        "_turn",
        "_wanted",
        "_worker",
        "answered_at_s",
        "decision",
        "failed",
        "outcome",
        "plan",
        "prefill",
        "retried",
        "sees_prefill",
    )

    def __init__(
        self,
        turn: PlannedTurn,
        placement: Placement,
        backlog: Backlog,
        *,
        number: int,
        max_resumptions: int = 0,
    ) -> None:
        self._turn = turn
        self._placement = placement
        self._backlog = backlog
        self._number = number
        self._resumptions = max_resumptions
        self._wanted = turn.decision  # what placement is asked for
        self.decision = turn.decision
        self.plan: Plan | None = None
        self.prefill: WorkerView | None = None
        self.failed: list[WorkerView] = []
        self.retried = False
        self.sees_prefill = True
        self.answered_at_s: float | None = None
        self.outcome: Outcome | None = None
        self._phase = _IDLE
        self._part = _WHOLE
        self._prefilled = False
        self._failure: Failure | None = None
        self._worker: WorkerView | None = None  # that failed
        self._queued: Queued | None = None  # in the backlog
        self._headroom: Headroom | None = None  # KV is reserved there
        self._stream_worker: WorkerView | None = None  # of a stream that stands still

    def start(self) -> Effect:
        """The first effect."""
        assert self._phase is _IDLE, "a request starts once"
        if self._turn.plan is not None:
            return self._send(self._turn.plan)
        return self._next()

    def on(self, event: Event, now_s: float) -> Effect:
        """Take an event, and give what is to be done next.

        Further events may come while an effect is pending. The next effect then replaces it, but
        for ``Note``, which is done at once, and ``Prime``, which waits for its turn. ``Settled``
        comes only when ``Abandon`` is done, ``Primed`` only when the legs are closed.

        Args:
            event: what has happened.
            now_s: when, by a monotonic clock.
        """
        if self._phase is _ENDED:
            return _NO_EFFECT
        # Not ``match``: a class pattern asks the class's metaclass, which every event would pay.
        if type(event) is Answered:
            return self._answered(event.streams, now_s)
        if type(event) is StreamEnded:
            if event.well:
                return self._finish(_OK, credited=self._decode)
            return self._finish(Outcome.WORKER_ERROR)
        if type(event) is Prefilled:
            self._prefilled = True
            self._leave_queue()
            return Note(self._prefill_worker)
        if type(event) is Failed:
            return self._leg_failed(event.failure)
        if type(event) is PrefillFailed:
            return self._prefill_failed(event.failure)
        if type(event) is Settled:
            return self._settled()
        if type(event) is StreamFailed:
            return self._finish(Outcome.WORKER_ERROR, blamed=self._decode)
        if type(event) is StreamBroke:
            return self._broke(event.resumable)
        if type(event) is PassageFound:
            relaying = self._phase is _RELAYING
            return Prime(self._decode, self._min_cached_tokens) if relaying else _NO_EFFECT
        if type(event) is Primed:
            return self._append(_Part.WITH_PASSAGE)
        if type(event) is ClientGone:
            return self._finish(Outcome.DISCONNECTED)
        if type(event) is Stopping:
            return self._finish(Outcome.STOPPED)
        if type(event) is Crashed:
            return self._finish(Outcome.INTERNAL_ERROR)
        assert_never(event)

    # -- one attempt -----------------------------------------------------------------------

    def _send(self, plan: Plan) -> Send:
        self._take(plan)
        return Send(plan)

    def _take(self, plan: Plan) -> None:
        """Begin an attempt: reserve what it needs, in the step in which it is decided."""
        self.plan, self.decision = plan, plan.decision
        self._phase, self._prefilled, self._failure = _WAITING, False, None
        if plan.prefill_tokens:
            worker = plan.decode if plan.prefill is None else plan.prefill
            work = self._turn.work(plan)
            has_answer = plan.prefill is None or self.sees_prefill
            self._queued = self._backlog.add(
                worker.identity, plan.prefill_tokens, work, has_answer=has_answer
            )
        self._headroom = plan.decode.headroom  # a restarted worker gets another one
        self._headroom.reserve(
            self._number, self._turn.kv_tokens, prefilled_here=plan.prefill is None
        )

    def _answered(self, streams: bool, now_s: float) -> Effect:
        credited = None if streams else self._decode  # a stream is judged by its end
        if self._phase is not _WAITING:  # the other leg has failed in the same moment
            return Note(credited=credited)
        assert self.plan is not None
        if self._part is not _WHOLE and not streams:
            return self._abandon(_NO_STREAM, self._decode)
        if self.plan.prefill is None:
            self._leave_queue()
        else:
            self.prefill = self.plan.prefill
        if self._headroom is not None:
            self._headroom.answered(self._number)
        if self.answered_at_s is None:
            self.answered_at_s = now_s
        self._phase = _RELAYING
        return Relay(self.plan, credited)

    def _prefill_failed(self, failure: Failure) -> Effect:
        self._leave_queue()
        if failure.cause is Cause.SILENT and self._failure is not None:
            return _NO_EFFECT  # it is silent only because the other leg has failed
        self._prefilled = True
        worker = self._prefill_worker
        if self._phase is _WAITING:
            return self._abandon(failure, worker)
        return Note(None, worker, failure, blames_worker(failure))

    def _leg_failed(self, failure: Failure) -> Effect:
        assert self.plan is not None
        silent = failure.cause is Cause.SILENT
        if silent and self._failure is not None:
            return _NO_EFFECT
        if silent and self.plan.prefill is not None and not self._prefilled:
            return self._prefill_failed(_NO_KV)  # it waits for KV that never came
        if self._phase is _WAITING:
            return self._abandon(failure, self._decode)
        return Note(None, self._decode, failure, blames_worker(failure))

    # -- after a failure -------------------------------------------------------------------

    def _abandon(self, failure: Failure, worker: WorkerView) -> Abandon:
        """Give the attempt up. What follows is chosen when the worker's state has been noted."""
        assert self.plan is not None
        self._release()
        self._phase, self._failure, self._worker = _ABANDONING, failure, worker
        probe: Sequence[WorkerView] = ()
        if self._has_retry(failure) and not self._is_appended:
            if failure.cause is Cause.LOST:
                self.failed.append(worker)
                probe = (worker,)
            elif failure.cause is Cause.TRANSFER:
                probe = self.plan.workers  # it may be either's doing
        return Abandon(
            worker,
            failure,
            blames_worker(failure),
            down=failure.cause is Cause.UNCONNECTED,
            probe=tuple(probe),
            local=self._is_local_turn,
        )

    def _settled(self) -> Effect:
        assert self._phase is _ABANDONING
        failure = self._failure
        if failure is None:  # of a stream that broke off
            return self._resume()
        if self._is_appended:
            return self._resume()
        if self._is_local_turn:
            if (reason := self._why_not_local(failure)) is None:
                return self._give_up(failure.error)
            self._wanted = Decision(Route.REMOTE, reason)
            return self._next()
        return self._next() if self._claim_retry(failure) else self._give_up(failure.error)

    def _has_retry(self, failure: Failure) -> bool:
        """Whether a worker's failure leaves the request its one retry."""
        return not self.retried and failure.error.outcome is Outcome.WORKER_ERROR

    def _claim_retry(self, failure: Failure) -> bool:
        """Use the retry, if the request may be sent once more.

        It may be sent as often as there are workers if nothing was sent. Once if it was, for it
        may have been what killed the worker. Where the worker lives and has failed, only to
        another one.
        """
        assert self._worker is not None
        if failure.cause is Cause.UNCONNECTED:
            return True
        if not self._has_retry(failure):
            return False
        match failure.cause:
            case Cause.LOST | Cause.TRANSFER:
                self.retried = True
            case Cause.ANSWERED | Cause.SILENT:
                self.failed.append(self._worker)
                self.retried = self._placement.has_alternative(
                    self._turn, self._worker, self.failed
                )
            case _:
                assert_never(failure.cause)
        return self.retried

    def _why_not_local(self, failure: Failure) -> Reason | None:
        """Why a local turn goes remote; None: a remote turn would meet the same error.

        A home that refuses has not failed: the remote turn may well decode there.
        """
        if failure.refusal is not None:
            return Reason.REFUSED_BY_WORKER
        if failure.unpatched:
            return Reason.HOME_UNPATCHED
        return Reason.HOME_GONE if self._claim_retry(failure) else None

    def _next(self) -> Effect:
        """Send the request, or the part of it that is asked for, to the workers that are left."""
        self.decision = self._wanted
        try:
            return self._send(self._placement.plan(self._turn, self._wanted, self.failed))
        except WorkerError as error:
            # Without its traceback, whose frames would hold the request in a cycle.
            return self._give_up(error.with_traceback(None))

    def _give_up(self, error: PpdError) -> Effect:
        """No worker is left for this part of the reply."""
        match self._part:
            case _Part.WHOLE:
                outcome = Outcome.WORKER_ERROR
                if isinstance(error, EngineError):
                    outcome = error.outcome
                return self._finish(outcome, error)
            case _Part.WITH_PASSAGE:
                return self._append(_Part.WITHOUT_PASSAGE, error)
            case _Part.REST | _Part.WITHOUT_PASSAGE:
                return self._finish(Outcome.TRUNCATED, error)
            case _:
                assert_never(self._part)

    # -- a stream --------------------------------------------------------------------------

    def _broke(self, resumable: bool) -> Effect:
        worker = self._decode
        self.failed.append(worker)
        if not resumable or self._resumptions <= 0:
            return self._finish(Outcome.TRUNCATED, blamed=worker)
        self._resumptions -= 1
        self._release()
        self._part, self._phase, self._failure = _Part.REST, _ABANDONING, None
        return Abandon(worker, None, blamed=True)

    def _resume(self) -> Effect:
        """Have another worker generate the rest."""
        replica = self.decision.route is Route.REPLICA
        self._wanted = Decision(Route.REPLICA if replica else Route.REMOTE, Reason.RESUMED)
        self.retried, self.prefill = False, None
        return self._next()

    def _append(self, part: _Part, reason: PpdError | None = None) -> Effect:
        """Go on with a stream that stands still, on the worker that has it."""
        if part is _Part.WITH_PASSAGE:
            if self._phase is not _RELAYING:
                return _NO_EFFECT  # it has ended, or broke off, meanwhile
            self._stream_worker = self._decode
        worker, passage = self._stream_worker, part is _Part.WITH_PASSAGE
        assert worker is not None
        self._release()
        self._part = part
        if not worker.takes_appends:
            resumed = self._resume()
            return Append(resumed.plan, passage, reason) if isinstance(resumed, Send) else resumed
        appended = Decision(Route.LOCAL, Reason.APPENDED)
        plan = Plan(appended, worker, min_cached_tokens=self._min_cached_tokens)
        self._take(plan)
        return Append(plan, passage, reason)

    # -- the end ---------------------------------------------------------------------------

    def _finish(
        self,
        outcome: Outcome,
        error: PpdError | None = None,
        *,
        credited: WorkerView | None = None,
        blamed: WorkerView | None = None,
    ) -> Finish:
        self._release()
        self._phase, self.outcome = _ENDED, outcome
        return Finish(outcome, error, credited, blamed)

    def _release(self) -> None:
        self._leave_queue()
        if self._headroom is not None:
            self._headroom.release(self._number)

    def _leave_queue(self) -> None:
        if self._queued is not None:
            self._backlog.remove(self._queued)
            self._queued = None

    # -- what the attempt is ---------------------------------------------------------------

    @property
    def _decode(self) -> WorkerView:
        assert self.plan is not None
        return self.plan.decode

    @property
    def _prefill_worker(self) -> WorkerView:
        assert self.plan is not None
        assert self.plan.prefill is not None
        return self.plan.prefill

    @property
    def _min_cached_tokens(self) -> int:
        """For what the worker of a stream prefills beside it or behind it."""
        features = self._turn.features
        return 0 if features is None else features.min_cached_tokens

    @property
    def _is_local_turn(self) -> bool:
        """It appends to the home's KV, and can go remote instead."""
        assert self.plan is not None
        own = (Reason.NO_PREFILL, Reason.APPENDED)
        return self.plan.route is Route.LOCAL and self.plan.reason not in own

    @property
    def _is_appended(self) -> bool:
        assert self.plan is not None
        return self.plan.reason is Reason.APPENDED
