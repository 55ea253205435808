"""Passing a decode worker's answer on to the client."""

from __future__ import annotations

import asyncio
import logging
import time

import orjson

from ppd.errors import WorkerError

from ..answers import LAST_WORDS, ErrorAnswer
from ..intake.inbound import Endpoint, Inbound
from ..wire.errors import describe
from ..workers.worker import Worker
from .context import RequestContext
from .internal import Asked
from .ledger import Ledger
from .legs import Answer, LegFailed
from .onward import Reader, StreamContinuation
from .resume import Insertion, Resumption
from .sse import DONE, Tail, usage_of_generate, usage_of_openai

logger = logging.getLogger("ppd.router.turns")

STOPPED = "stopped"  # an outcome, in the words of ``ppd_finished``
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def relay_body(request: Asked, context: RequestContext, answer: Answer, ledger: Ledger) -> None:
    """A whole answer, as the worker gave it."""
    try:
        parsed = orjson.loads(answer.head)
    except orjson.JSONDecodeError:
        parsed = None
    if context.inbound.endpoint is Endpoint.GENERATE:
        ledger.learn(context, answer.worker, usage_of_generate(parsed))
    elif isinstance(parsed, dict):
        ledger.learn(context, answer.worker, usage_of_openai(parsed))
    ledger.finished(context, "ok")
    headers = {"Content-Type": answer.content_type, **context.answer_headers()}
    request.respond(200, answer.head, headers)


async def relay_stream(
    request: Asked,
    context: RequestContext,
    answer: Answer,
    ledger: Ledger,
    onward: StreamContinuation,
    max_resumptions: int,
    reader: Reader | None = None,
) -> None:
    """A stream, block by block; one that breaks off gets one error event and an end.

    Args:
        max_resumptions: how often another worker may be asked for the rest; 0: never.
        reader: of a stream that can be continued.
    """
    resumption = None
    if (max_resumptions or reader) and Resumption.possible(context.inbound):
        resumption = Resumption(context.inbound)
    relay = _Relay(request, context, answer, ledger, onward, resumption, reader)
    request.connection.set_listener(relay)
    answer.leg.set_sink(relay)
    try:
        outcome = await relay.outcome
        while outcome is None:
            if relay.continued is not None:
                rest = await _appended(context, relay.continued, relay.worker, onward)
                if rest is None and (without := relay.without_aside()) is not None:
                    rest = await _appended(context, without, relay.worker, onward)
            else:
                max_resumptions -= 1
                rest = await _rest(context, resumption, onward) if max_resumptions >= 0 else None
                ledger.resumed(rest is not None)
            if relay.stopped:
                if rest is not None:
                    rest.leg.close()
                outcome = STOPPED
            elif rest is None:
                outcome = relay.truncated()
            else:
                relay.go_on_with(rest)
                outcome = await relay.outcome
    finally:
        relay.close()
    ledger.finished(context, outcome)
    request.end()


async def _appended(
    context: RequestContext, continued: Inbound, worker: Worker, onward: StreamContinuation
) -> Answer | None:
    """The rest behind something more; None if there is no way to it."""
    try:
        return await onward.append(context, continued, worker)
    except (LegFailed, WorkerError) as error:
        logger.warning("the stream cannot go on behind what was found: %s", error)
        return None


async def _rest(
    context: RequestContext, resumption: Resumption | None, onward: StreamContinuation
) -> Answer | None:
    """The rest of a stream that was lost; None if there is no way to it."""
    continued = None if resumption is None else resumption.continued()
    if continued is None:
        return None
    try:
        return await onward.go_on(context, continued)
    except (LegFailed, WorkerError) as error:
        logger.warning("the stream cannot go on elsewhere: %s", error)
        return None


class _Relay:
    """``legs.Sink`` of the worker's stream, ``wire.request.Listener`` of the client.

    Attributes:
        stopped: the router has ended it.
        outcome: how it ended; None: the worker was lost, and another may go on; or it was left,
            and shall go on with ``continued``.
    """

    def __init__(
        self,
        request: Asked,
        context: RequestContext,
        answer: Answer,
        ledger: Ledger,
        onward: StreamContinuation,
        resumption: Resumption | None,
        reader: Reader | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[str | None] = self._loop.create_future()
        self._request = request
        self._course = context
        self._leg = answer.leg
        self._ledger = ledger
        self._onward = onward
        self._resumption = resumption
        self._reader = reader
        self._resumed = False
        self.stopped = False
        self.continued: Inbound | None = None
        self._priming: asyncio.Task[None] | None = None
        self._declined = False
        self._left_s = 0.0
        self._trouble = "the stream could not go on behind what was found"
        self._waits_since_s: float | None = None
        self._paused = False
        inbound = context.inbound
        self._tail = Tail(
            hide_usage=not inbound.asks_usage,
            native=inbound.endpoint is Endpoint.GENERATE,
            batch=inbound.prompts > 1,
        )
        if reader is not None and resumption is not None:
            reader.found.add_done_callback(self._found)
        self._times, self._last_s = ledger.passing_on(context), time.perf_counter()
        headers = {**_EVENT_STREAM, **context.answer_headers()}
        request.start(200, headers, self._pass_on(answer.head))

    @property
    def worker(self) -> Worker:
        return self._leg.worker

    def go_on_with(self, answer: Answer) -> None:
        """Another worker has the rest, or the same one a new rest."""
        reader = self._reader
        if self.continued is not None and reader is not None:
            assert self._resumption is not None
            stalled_s = time.perf_counter() - self._left_s
            if self._declined:
                self._decline(reader, stalled_s)
            else:
                reader.appended(self._resumption.appended, stalled_s)
                reader.found.add_done_callback(self._found)
        self._leg, self._resumed, self.continued = answer.leg, True, None
        self._declined = False
        self.outcome = self._loop.create_future()
        self.block(answer.head)
        self._leg.hold(self._paused)
        self._leg.set_sink(self)
        if reader is not None and reader.found.done():  # but the worker was lost meanwhile
            self._found(reader.found)

    def without_aside(self) -> Inbound | None:
        """The request for the rest of a stream that was left, as if nothing had been found."""
        assert self._resumption is not None
        self._resumption.take_back()
        self._declined = True
        return self._resumption.continued()

    def close(self) -> None:
        if self._priming is not None:
            self._priming.cancel()
        if self._reader is not None:
            self._reader.close()

    def _found(self, found: asyncio.Future[str]) -> None:
        """The stream shall go on behind what was found, if it can."""
        if found.cancelled() or self.outcome.done() or self._tail.done:
            return
        assert self._resumption is not None
        primer = self._resumption.primer(found.result())
        if primer is not None:
            if self._priming is not None:
                self._priming.cancel()
            self._priming = self._loop.create_task(self._leave_for(*primer))

    async def _leave_for(self, primer: Inbound, aside: Insertion) -> None:
        """Leave the stream where it is once there is KV for it to go on behind ``aside``."""
        assert self._reader is not None
        assert self._resumption is not None
        try:
            async with asyncio.timeout(self._reader.room_s):
                await self._onward.prime(self._course, primer, self.worker)
            if self.outcome.done() or self._tail.done:
                return
            self.continued = self._resumption.continued(aside)
            if self.continued is not None:
                self._left_s = time.perf_counter()
                self._leg.close()
                self.outcome.set_result(None)
        except (LegFailed, TimeoutError) as error:
            logger.warning("%s has no room beside a stream: %s", self.worker.url, describe(error))
            self._decline(self._reader, 0.0)
        except Exception as error:  # noqa: BLE001 - of ours: the request shall tell
            if not self.outcome.done():
                self.outcome.set_exception(error)

    def _decline(self, reader: Reader, stalled_s: float) -> None:
        reader.declined(stalled_s)
        reader.found.add_done_callback(self._found)

    def block(self, block: bytes) -> None:
        now_s = time.perf_counter()
        self._times.observe(now_s - self._last_s)
        self._last_s = now_s
        try:
            self._request.write(self._pass_on(block))
        except Exception as error:  # noqa: BLE001 - of ours: it must not pass for the worker's
            if not self.outcome.done():
                self.outcome.set_exception(error)

    def _pass_on(self, block: bytes) -> bytes:
        tail, resumption = self._tail, self._resumption
        if self._resumed and resumption is not None:
            block = resumption.as_rest(block)
        passed = tail.pass_on(block)
        if resumption is not None:
            resumption.sent(passed)
        if self._reader is not None:
            self._reader.read(passed)
        if tail.done and not tail.failed:
            # Before the client sees the end, so that its next turn finds this one.
            self._note_wait()
            self._ledger.learn(self._course, self._leg.worker, tail.usage)
        return passed

    def ended(self, trouble: str | None) -> None:
        self._note_wait()
        if self.outcome.done():  # cancelled, with whoever waited for it
            return
        worker = self._leg.worker
        if self._tail.done:
            if not self._tail.failed:
                worker.breaker.succeeded()
            self.outcome.set_result("worker_error" if self._tail.failed else "ok")
            return
        worker.breaker.failed()
        self._tail.breaks_off()
        if self._tail.failed:  # the client knows; a second error would be one too many
            self._request.write(DONE)
            self.outcome.set_result("worker_error")
            return
        self._trouble = trouble or "the decode worker ended its stream early"
        logger.error("truncated stream from %s: %s", worker.url, self._trouble)
        self._course.failed.append(worker)
        if self._resumption is None:
            self.outcome.set_result(self.truncated())
        else:
            self.outcome.set_result(None)

    def truncated(self) -> str:
        """Nobody goes on: the client is told, and gets an end."""
        told = ErrorAnswer(502, self._trouble, "worker_error", code=502)
        self._request.write(told.event + DONE)
        return "truncated"

    def stop(self) -> None:
        """The router stops before the worker, or whoever goes on in its place, has ended."""
        if self.stopped or self._tail.done or self._is_over:
            return
        self.stopped = True
        self._request.write(DONE if self._tail.failed else LAST_WORDS.event + DONE)
        if not self.outcome.done():
            self._leg.close()
            self.outcome.set_result(STOPPED)

    @property
    def _is_over(self) -> bool:
        """It is not while somebody is sought who goes on."""
        outcome = self.outcome
        failed = outcome.done() and (outcome.cancelled() or outcome.exception() is not None)
        return failed or (outcome.done() and outcome.result() is not None)

    def pause(self) -> None:
        self._waits_since_s, self._paused = time.perf_counter(), True
        self._leg.hold(True)

    def resume(self) -> None:
        self._note_wait()
        self._paused = False
        self._leg.hold(False)

    def _note_wait(self) -> None:
        """Time in which the client took nothing is not the worker's."""
        if self._waits_since_s is not None:
            self._course.client_waits_s += time.perf_counter() - self._waits_since_s
            self._waits_since_s = None
