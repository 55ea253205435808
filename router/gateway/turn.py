"""The answer to one turn, which a gateway passes on: what it shows of the workers is recorded."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import orjson
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest

from ppd.effects import (
    Abandon,
    Answered,
    Cause,
    ClientGone,
    Crashed,
    Failed,
    Finish,
    Prefilled,
    StreamBroke,
    StreamEnded,
    StreamFailed,
)
from ppd.errors import EngineError
from ppd.outcome import Outcome

from ..intake.inbound import Endpoint
from ..serving.context import RequestContext
from ..serving.legs import error_in_body, error_in_events, failure_of
from ..serving.recorder import RequestRecorder
from ..serving.sse import EventCutter, Tail
from ..workers.health import WorkerHealth
from ..workers.sglang import usage_of_generate, usage_of_openai
from ..workers.worker import Worker
from .messages import Messages, data_of, is_last


class Turn:
    """One turn, from its answer on. Its end is recorded before the client has it.

    Args:
        context: of the request.
        worker: that decodes.
        messages: of the exchange.
        recorder: of answers.
        health: of workers.
    """

    def __init__(
        self,
        context: RequestContext,
        worker: Worker,
        messages: Messages,
        recorder: RequestRecorder,
        health: WorkerHealth,
    ) -> None:
        self._context = context
        self._worker = worker
        self._messages = messages
        self._recorder = recorder
        self._health = health

    async def stream(self, response: AsyncIterator[ProcessingRequest]) -> None:
        """Pass a stream of events on."""
        inbound, worker = self._context.inbound, self._worker
        cutter = EventCutter()
        tail = Tail(
            hide_usage=not inbound.asks_usage,
            native=inbound.endpoint is Endpoint.GENERATE,
            batch=inbound.prompts > 1,
        )
        times, last_s = self._recorder.itl(self._context), 0.0
        begun = failed = False
        try:
            async for message in response:
                passed = block = cutter.feed(data_of(message))
                now_s = time.perf_counter()
                if block and begun:
                    times.observe(now_s - last_s)
                elif block and not failed:
                    error = error_in_events(block, 200)
                    failed, begun = error is not None, error is None
                    if error is not None:
                        await self.failed(error)
                    else:
                        self._context.streams = True
                        worker.streams += 1
                        self._answered(streams=True)
                if block and begun:
                    last_s, passed = now_s, tail.pass_on(block)
                    if tail.done and not tail.failed:
                        self._recorder.record_answer(self._context, worker, tail.usage)
                if is_last(message) and not failed:
                    await self._stream_ends(tail, begun)
                await self._messages.pass_on(passed, message)
        finally:
            worker.streams -= begun

    async def _stream_ends(self, tail: Tail, begun: bool) -> None:
        if not begun:
            text = f"{self._worker.role} worker ended its stream before the first event"
            await self.failed(EngineError(text, status=502))
        elif tail.done:
            self.end(StreamEnded(well=not tail.failed))
        else:
            tail.breaks_off()
            self.end(StreamFailed() if tail.failed else StreamBroke(resumable=False))

    async def whole(self, status: int, response: AsyncIterator[ProcessingRequest]) -> None:
        """Pass a whole answer on."""
        parts: list[bytes] = []
        last: ProcessingRequest | None = None
        async for message in response:
            if last is not None:
                await self._messages.pass_on(data_of(last), last)
            last = message
            parts.append(data_of(message))
        await self._record(status, b"".join(parts))
        if last is not None:
            await self._messages.pass_on(data_of(last), last)

    async def _record(self, status: int, body: bytes) -> None:
        if (error := error_in_body(body, status)) is not None:
            await self.failed(error)
            return
        self._answered(streams=False)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if self._context.inbound.endpoint is Endpoint.GENERATE:
            usage = usage_of_generate(answer)
        else:
            usage = usage_of_openai(answer) if isinstance(answer, dict) else None
        self._recorder.record_answer(self._context, self._worker, usage)
        self.end(StreamEnded())

    def _answered(self, *, streams: bool) -> None:
        """The decode worker answers, so the prefill worker has done its part."""
        plan = self._context.attempts.plan
        if plan is not None and plan.prefill is not None:
            self._context.take(Prefilled())
        self._context.take(Answered(streams))
        self._recorder.answered(self._context)

    async def failed(self, error: EngineError, cause: Cause = Cause.ANSWERED) -> None:
        """Hold an error for or against the workers. The gateway sent once, so the turn ends."""
        effect = self._context.take(Failed(failure_of(error, cause)))
        self._recorder.finished(self._context, error.outcome)
        if type(effect) is Abandon:
            await self._health.settle(effect)
        self._context.take(ClientGone())

    def foreign(self) -> None:
        """Another worker has answered: nothing is known of ours."""
        self._recorder.finished(self._context, Outcome.OK)
        self._context.take(ClientGone())

    def end(self, event: ClientGone | Crashed | StreamBroke | StreamEnded | StreamFailed) -> None:
        """End the turn by its last event; each further one does nothing."""
        effect = self._context.take(event)
        if type(effect) is Finish:
            self._recorder.finished(self._context, effect.outcome)
