"""The ways in which workers and networks fail, and the script that fails in them.

``FaultScript.fault`` selects the way. A request may select it, too: its ``user`` field may name a
fault for each role (``"decode=resets"``). With :class:`eval.fake_worker.kv.KvState` a worker also
holds KV as an engine does.
"""

from __future__ import annotations

import asyncio
import re
from enum import StrEnum

from ppd.contract import LOCAL_MARKER

from ..dialects import DONE, Counts, error_answer, error_event, stream_events, whole_answer
from .connection import MAX_TOKENS
from .kv import KvState
from .ranks import Ranks
from .request import Request
from .state import IDLE_TOKENS
from .worker import FakeWorker

_USER = re.compile(rb'"user": ?"([^"]*)"')
_ERROR = "error, by request"


class Fault(StrEnum):
    """A way in which a worker fails."""

    NONE = "none"
    LATE = "late"  # waits for a while, then answers
    HANGS = "hangs"  # never answers
    HOLDS = "holds"  # the first event, then nothing
    FAILS = "fails"  # status 500
    REJECTS = "rejects"  # status 400
    DROPS = "drops"  # closes the connection without an answer
    RESETS = "resets"  # resets the connection after some events
    ENDS_EARLY = "ends_early"  # in good order, but without [DONE]
    ERROR_FIRST = "error_first"  # the first event is an error, status 200
    ERROR_LATER = "error_later"  # some events, an error, [DONE]
    ERROR_ENDS = "error_ends"  # some events, an error, and the end without [DONE]


_ANSWERS = (Fault.NONE, Fault.LATE)  # the answer is whole, and a prefill worker transfers KV


class FaultScript:
    """Answers each request, or fails in the selected way.

    Attributes:
        fault: the way for requests that name no fault.
        late_s: how late ``LATE`` is.
        pace_s: between two events of a stream; 0: all at once.
        kv: the KV of the worker; None: it holds none, and never refuses a local turn.
        ranks: its ranks, if it has data parallelism.
    """

    def __init__(
        self,
        late_s: float = 2.0,
        pace_s: float = 0.0,
        kv: KvState | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.fault = Fault.NONE
        self.late_s = late_s
        self.pace_s = pace_s
        self.kv = kv
        self.ranks = ranks

    async def __call__(self, request: Request) -> None:
        """Answer one request."""
        body = request.leg.body
        named = _USER.search(body)
        user = named[1].decode() if named else ""
        fault = self._fault_of(user, request.worker.role)
        match fault:
            case Fault.LATE:
                await asyncio.sleep(self.late_s)
            case Fault.DROPS:
                request.drop()
                return
            case Fault.HANGS:
                await asyncio.Event().wait()
        if self.kv is not None:
            await self.kv.wait_for_transfer(request.worker.role, fault in _ANSWERS, body)
        counts = self._counts(user, body)
        if self.ranks is not None and request.worker.dp_size > 1:
            counts = await self.ranks.take(body, request.worker.dp_size) or counts
        if fault is Fault.FAILS:
            request.answer(error_answer("out of memory, by request", 500), 500)
        elif fault is Fault.REJECTS:
            request.answer(error_answer("no such thing, by request", 400), 400)
        elif isinstance(counts, str):
            _refuse(request, counts, 400)
        elif request.wants_stream:
            await self._stream(request, fault, _number(user), counts)
        else:
            await _answer_whole(request, fault, _number(user), counts)

    def _fault_of(self, user: str, role: str) -> Fault:
        for word in user.split():
            of_role, _, name = word.partition("=")
            if of_role == role:
                return Fault(name)
        return self.fault

    def _counts(self, user: str, body: bytes) -> Counts | str:
        """Return the token counts of the answer, or the message of a refusal."""
        tokens = MAX_TOKENS.search(body)
        words = int(tokens[1]) if tokens else 4
        if self.kv is not None:
            return self.kv.counts(user.split()[1], body, words)
        prompt = 100 + len(body) // 4
        return Counts(prompt, words, prompt if LOCAL_MARKER.encode() in body else 0)

    async def _stream(self, request: Request, fault: Fault, number: int, counts: Counts) -> None:
        start = request.leg.body.count(b" %d." % number)  # where another worker has broken off
        events = stream_events(request.path, number, counts, request.worker.port, start)
        if fault is Fault.ERROR_FIRST:
            _refuse(request, _ERROR, 500)
            return
        request.send(events[0])
        if fault is Fault.HOLDS:
            await asyncio.Event().wait()
        following = events[1:] if fault in _ANSWERS else events[1:-1]
        if self.pace_s:
            for i, event in enumerate(following):
                if i:
                    await asyncio.sleep(self.pace_s)
                request.send(event)
        elif following:
            request.send(*following)
        match fault:
            case Fault.RESETS:
                await asyncio.sleep(0)  # what is written leaves first
                request.reset()
            case Fault.ERROR_LATER:
                request.send(error_event(_ERROR, 500) + DONE)
            case Fault.ERROR_ENDS:
                request.send(error_event(_ERROR, 500))


def fault_worker(role: str, model: str, script: FaultScript) -> FakeWorker:
    """Return an idle worker that answers or fails as a script selects."""
    return FakeWorker(role, script, model=model, free_tokens=IDLE_TOKENS)


def _refuse(request: Request, message: str, status: int) -> None:
    """Refuse as SGLang does: an error of a stream has status 200."""
    if request.wants_stream:
        request.send(error_event(message, status) + DONE)
    else:
        request.answer(error_answer(message, status), status)


async def _answer_whole(request: Request, fault: Fault, number: int, counts: Counts) -> None:
    match fault:
        case Fault.HOLDS:
            await asyncio.Event().wait()
        case Fault.RESETS:
            request.begin_whole()
            await asyncio.sleep(0)  # what is written leaves first
            request.reset()
        case Fault.ENDS_EARLY:
            request.begin_whole()
            request.close()
        case Fault.ERROR_FIRST | Fault.ERROR_LATER | Fault.ERROR_ENDS:
            request.answer(error_answer(_ERROR, 500), 500)
        case _:
            request.answer(whole_answer(request.path, number, counts, request.worker.port))


def _number(user: str) -> int:
    """Return the number of a request: the digits that its ``user`` begins with."""
    digits = user.partition(" ")[0]
    return int(digits) if digits.isdigit() else 0
