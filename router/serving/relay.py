"""Passes a worker's answer on to the client."""

from __future__ import annotations

import asyncio
import logging
import time

import orjson

from ppd.effects import (
    Crashed,
    PassageFound,
    Prime,
    Primed,
    Stopping,
    StreamBroke,
    StreamEnded,
    StreamFailed,
)
from ppd.outcome import Outcome

from ..answers import STOPPING_ANSWER, ErrorAnswer
from ..intake.inbound import Endpoint, Inbound
from ..workers.sglang import usage_of_generate, usage_of_openai
from .context import RequestContext
from .hooks import StreamObserver
from .internal import ServerRequest
from .legs import Answer
from .recorder import RequestRecorder
from .resume import Insertion, Resumption
from .sending import Sender
from .sse import DONE, Tail

logger = logging.getLogger("ppd.router.turns")

_GENERATE = Endpoint.GENERATE  # an enum's attribute is slow to look up (Python 3.11)
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def relay_body(
    request: ServerRequest, context: RequestContext, answer: Answer, recorder: RequestRecorder
) -> None:
    """Pass on a whole answer, as the worker gave it."""
    try:
        body = orjson.loads(answer.head)
    except orjson.JSONDecodeError:
        body = None
    if context.inbound.endpoint is _GENERATE:
        recorder.record_answer(context, answer.worker, usage_of_generate(body))
    elif isinstance(body, dict):
        recorder.record_answer(context, answer.worker, usage_of_openai(body))
    headers = {"Content-Type": answer.content_type, **context.answer_headers()}
    request.respond(200, answer.head, headers)


class StreamRelay:
    """Passes a stream on, block by block, across all workers that generate parts of it.

    A ``legs.Sink`` of the worker's stream and a ``wire.request.Listener`` of the client. How the
    stream ended becomes an event of the request's attempts.

    Args:
        resumption: what the client was sent, for a stream that can be continued; else None.
        observer: of such a stream.

    Attributes:
        resuming: the stream broke off, and could be continued.
    """

    __slots__ = (
        "_client_waits_since_s",
        "_context",
        "_continues",
        "_declined",
        "_insertion",
        "_last_s",
        "_left_s",
        "_leg",
        "_loop",
        "_observer",
        "_paused",
        "_primer",
        "_priming",
        "_recorder",
        "_request",
        "_resumption",
        "_sender",
        "_stopped",
        "_tail",
        "_times",
        "_trouble",
        "resuming",
    )

    def __init__(
        self,
        request: ServerRequest,
        context: RequestContext,
        answer: Answer,
        recorder: RequestRecorder,
        sender: Sender,
        resumption: Resumption | None,
        observer: StreamObserver | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._context = context
        self._leg = answer.leg
        self._recorder = recorder
        self._sender = sender
        self._resumption = resumption
        self._observer = observer if resumption is not None else None
        self.resuming = False
        self._continues = False  # blocks are of a later stream than the first
        self._insertion: Insertion | None = None  # being appended
        self._declined = False  # it was given up
        self._left_s = 0.0
        self._primer: tuple[Inbound, Insertion] | None = None
        self._priming: asyncio.Task[None] | None = None
        self._trouble = "the stream could not go on behind what was found"
        self._client_waits_since_s: float | None = None
        self._paused = False
        self._stopped = False
        inbound = context.inbound
        self._tail = Tail(
            hide_usage=not inbound.asks_usage,
            native=inbound.endpoint is Endpoint.GENERATE,
            batch=inbound.prompts > 1,
        )
        if self._observer is not None:
            self._observer.found.add_done_callback(self._found)
        self._times, self._last_s = recorder.itl(context), time.perf_counter()
        headers = {**_EVENT_STREAM, **context.answer_headers()}
        request.start(200, headers, self._pass_on(answer.head))
        request.connection.set_listener(self)
        self._leg.set_sink(self)

    @property
    def complete(self) -> bool:
        """Whether the client was sent the whole stream, its end included."""
        return self._tail.done and not self._tail.failed

    # -- legs.Sink ------------------------------------------------------------------------

    def block(self, block: bytes) -> None:
        """Pass on whole events."""
        now_s = time.perf_counter()
        self._times.observe(now_s - self._last_s)
        self._last_s = now_s
        try:
            self._request.write(self._pass_on(block))
        except Exception:  # noqa: BLE001 - a bug of ours: it must not be taken for the worker's failure
            self._crash()

    def ended(self, trouble: str | None) -> None:
        """The worker's stream has ended, or broke off."""
        try:
            self._end(trouble)
        except Exception:  # noqa: BLE001 - likewise
            self._crash()

    def _end(self, trouble: str | None) -> None:
        self._note_wait()
        context, tail = self._context, self._tail
        if context.attempts.outcome is not None:
            return
        if tail.done:
            context.deliver(StreamEnded(well=not tail.failed))
            return
        self._cancel_priming()
        tail.breaks_off()
        if tail.failed:  # the client has the error; a second one would be one too many
            self._request.write(DONE)
            context.deliver(StreamFailed())
            return
        self._trouble = trouble or "the decode worker ended its stream early"
        logger.error("truncated stream from %s: %s", self._leg.worker.name, self._trouble)
        rest = None
        if self._resumption is not None:
            self.resuming = True
            rest = self._resumption.continued()
            context.inbound = rest or context.inbound
        context.deliver(StreamBroke(resumable=rest is not None))

    # -- wire.request.Listener --------------------------------------------------------------

    def pause(self) -> None:
        """The client takes no more for now."""
        self._client_waits_since_s, self._paused = time.perf_counter(), True
        self._leg.pause_reading()

    def resume(self) -> None:
        """The client takes more again."""
        self._note_wait()
        self._paused = False
        self._leg.resume_reading()

    def stop(self) -> None:
        """The router stops before the stream has ended: write its end, now."""
        if self._stopped or self._tail.done or self._context.attempts.outcome is not None:
            return
        self._stopped = True
        self._request.write(DONE if self._tail.failed else STOPPING_ANSWER.event + DONE)
        self._leg.close()
        self._context.deliver(Stopping())

    # -- a stream that is continued ---------------------------------------------------------

    def go_on(self, answer: Answer) -> None:
        """Go on with a worker's stream of the rest."""
        observer = self._observer
        if self._insertion is not None and observer is not None:
            assert self._resumption is not None
            stalled_s = time.perf_counter() - self._left_s
            if self._declined:
                self._decline(observer, stalled_s)
            else:
                observer.appended(self._resumption.appended, stalled_s)
                observer.found.add_done_callback(self._found)
        elif observer is not None and observer.found.done():  # found while no worker had the stream
            self._loop.call_soon(self._found, observer.found)
        self._insertion, self._declined, self.resuming = None, False, False
        self._leg, self._continues = answer.leg, True
        self.block(answer.head)
        if self._paused:
            self._leg.pause_reading()
        self._leg.set_sink(self)

    def prime(self, prime: Prime) -> None:
        """Begin to prefill the passage that was found beside the stream."""
        assert self._primer is not None
        self._cancel_priming()
        self._priming = self._loop.create_task(self._prime(prime, *self._primer))

    def give_passage_up(self) -> None:
        """Make the request for the rest of a stream that stands still one without the passage."""
        assert self._resumption is not None
        self._resumption.take_back()
        self._declined = True
        rest = self._resumption.continued()
        assert rest is not None, "it could be continued with the passage"
        self._context.inbound = rest

    def finish(self, outcome: Outcome) -> None:
        """Write the end of the stream."""
        self._cancel_priming()
        if self._observer is not None:
            self._observer.close()
        if outcome is Outcome.TRUNCATED:
            error = ErrorAnswer(502, self._trouble, "worker_error", code=502)
            self._request.write(error.event + DONE)
        if outcome is Outcome.INTERNAL_ERROR:
            self._request.abort()
        else:
            self._request.end()

    def close(self) -> None:
        """Stop observing a stream whose client is gone."""
        self._cancel_priming()
        if self._observer is not None:
            self._observer.close()

    def _found(self, found: asyncio.Future[str]) -> None:
        """A passage was found: the stream goes on behind it, if it can."""
        if found.cancelled() or self._tail.done:
            return
        assert self._resumption is not None
        self._primer = self._resumption.primer(found.result())
        if self._primer is not None:
            self._context.deliver(PassageFound())

    async def _prime(self, prime: Prime, primer: Inbound, insertion: Insertion) -> None:
        """Leave the stream where it is once there is KV for it to go on behind the passage."""
        assert self._observer is not None
        try:
            async with asyncio.timeout(self._observer.room_s):
                failure = await self._sender.prime(self._context, primer, prime)
        except TimeoutError:
            self._has_no_room("no answer in time")
        except Exception:  # noqa: BLE001 - a bug of ours must end the request
            self._crash()
        else:
            if failure is not None:
                self._has_no_room(failure.error.message)
            else:
                self._leave(insertion)

    def _leave(self, insertion: Insertion) -> None:
        """Leave the stream where it is, to go on behind the passage."""
        assert self._resumption is not None
        if self._tail.done or self._context.attempts.outcome is not None:
            return
        try:
            continued = self._resumption.continued(insertion)
        except Exception:  # noqa: BLE001 - likewise
            self._crash()
            return
        if continued is not None:
            self._context.inbound, self._insertion = continued, insertion
            self._left_s = time.perf_counter()
            self._context.close_legs()
            self._context.deliver(Primed())

    def _has_no_room(self, message: str) -> None:
        assert self._observer is not None
        logger.warning("%s has no room beside a stream: %s", self._leg.worker.name, message)
        self._decline(self._observer, 0.0)

    def _crash(self) -> None:
        logger.exception("a stream cannot be relayed")
        self._leg.close()  # no block follows the end
        self._context.deliver(Crashed())

    def _decline(self, observer: StreamObserver, stalled_s: float) -> None:
        observer.declined(stalled_s)
        observer.found.add_done_callback(self._found)

    def _cancel_priming(self) -> None:
        if self._priming is not None:
            self._priming.cancel()
            self._priming = None

    # -- the bytes --------------------------------------------------------------------------

    def _pass_on(self, block: bytes) -> bytes:
        tail, resumption = self._tail, self._resumption
        if self._continues and resumption is not None:
            block = resumption.as_rest(block)
        passed = tail.pass_on(block)
        if resumption is not None:
            resumption.sent(passed)
        if self._observer is not None:
            self._observer.read(passed)
        if tail.done and not tail.failed:
            # Before the client sees the end, so that its next turn finds this one.
            self._note_wait()
            self._recorder.record_answer(self._context, self._leg.worker, tail.usage)
        return passed

    def _note_wait(self) -> None:
        """Time in which the client took nothing is not the worker's."""
        if self._client_waits_since_s is not None:
            self._context.client_waits_s += time.perf_counter() - self._client_waits_since_s
            self._client_waits_since_s = None
