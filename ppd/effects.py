"""Events of a request's attempts, and the effects that follow from them.

``ppd.attempts`` takes the events and gives the effects. No structure of this file refers back to
what holds it, so none needs the garbage collector.
"""

from __future__ import annotations

from enum import StrEnum
from typing import final

import msgspec

from ppd.contract import Refusal
from ppd.errors import EngineError, PpdError
from ppd.outcome import Outcome
from ppd.placement import Plan, WorkerView

# -- failures -----------------------------------------------------------------------------


class Cause(StrEnum):
    """How a leg failed, which decides what may be tried next."""

    ANSWERED = "answered"  # the worker answered with an error, or with nonsense
    UNCONNECTED = "unconnected"  # nothing was sent
    LOST = "lost"  # the connection broke with the request in the worker's hands
    SILENT = "silent"  # connected, but no bytes came for too long
    TRANSFER = "transfer"  # the KV did not get from the prefill worker to the decode worker


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why a leg gave no answer.

    Attributes:
        refusal: by a decode worker that does not take a local turn.
        unpatched: the decode worker runs without the plugin, so it takes no local turns at all.
    """

    cause: Cause
    error: EngineError
    refusal: Refusal | None = None
    unpatched: bool = False


# -- events -------------------------------------------------------------------------------


@final
class Answered(msgspec.Struct, frozen=True, gc=False):
    """The worker that decodes has begun to answer, or has answered as a whole."""

    streams: bool


@final
class Failed(msgspec.Struct, frozen=True, gc=False):
    """The leg to the worker that decodes failed before anything of it was relayed."""

    failure: Failure


@final
class Prefilled(msgspec.Struct, frozen=True, gc=False):
    """The leg to the prefill worker of a remote turn has ended well."""


@final
class PrefillFailed(msgspec.Struct, frozen=True, gc=False):
    """The leg to the prefill worker of a remote turn failed."""

    failure: Failure


@final
class Settled(msgspec.Struct, frozen=True, gc=False):
    """``Abandon`` is carried out."""


@final
class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """The relayed answer has reached its end; of a stream, ``[DONE]``.

    Attributes:
        well: False if an error event of the engine came before the end. No worker is blamed: the
            error may be about the request.
    """

    well: bool = True


@final
class StreamFailed(msgspec.Struct, frozen=True, gc=False):
    """The engine wrote an error event, and the stream broke off after it. The worker is blamed."""


@final
class StreamBroke(msgspec.Struct, frozen=True, gc=False):
    """The stream broke off without an error event. The worker is blamed.

    Attributes:
        resumable: another worker can generate the rest.
    """

    resumable: bool


@final
class PassageFound(msgspec.Struct, frozen=True, gc=False):
    """Retrieval has found a passage for the reply that is being relayed."""


@final
class Primed(msgspec.Struct, frozen=True, gc=False):
    """The stream's worker has prefilled the passage; the stream stands still."""


@final
class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """The client has closed its connection."""


@final
class Stopping(msgspec.Struct, frozen=True, gc=False):
    """The router stops and waits no longer."""


@final
class Crashed(msgspec.Struct, frozen=True, gc=False):
    """An effect could not be carried out for a bug of the router."""


Event = (
    Answered
    | Failed
    | Prefilled
    | PrefillFailed
    | Settled
    | StreamEnded
    | StreamFailed
    | StreamBroke
    | PassageFound
    | Primed
    | ClientGone
    | Stopping
    | Crashed
)


# -- effects ------------------------------------------------------------------------------


@final
class Send(msgspec.Struct, frozen=True, gc=False):
    """Open the legs of a plan; ``Answered`` or ``Failed`` follows."""

    plan: Plan


@final
class Append(msgspec.Struct, frozen=True, gc=False):
    """Open a leg for the rest of a stream behind a passage; ``Answered`` or ``Failed`` follows.

    Attributes:
        passage: it is part of the request. Else it was given up, for ``reason``: no worker takes
            the rest behind it, and the stream goes on as if nothing had been found.
    """

    plan: Plan
    passage: bool
    reason: PpdError | None = None


@final
class Abandon(msgspec.Struct, frozen=True, gc=False):
    """Close the legs of the attempt; ``Settled`` follows.

    Attributes:
        reason: the failure; None for a stream that broke off.
        worker: that failed.
        blamed: the failure is held against it.
        down: nothing listens there: no more requests until a probe succeeds.
        probe: workers to be probed before anything is sent again.
        local: the attempt was a local turn that now becomes a remote one.
    """

    worker: WorkerView
    reason: Failure | None
    blamed: bool
    down: bool = False
    probe: tuple[WorkerView, ...] = ()
    local: bool = False


@final
class Relay(msgspec.Struct, frozen=True, gc=False):
    """Pass the answer on to the client; ``StreamEnded`` or one of its like follows.

    Attributes:
        credited: the worker has shown that it works; None while its stream is still to end.
    """

    plan: Plan
    credited: WorkerView | None


@final
class Prime(msgspec.Struct, frozen=True, gc=False):
    """Have the stream's worker prefill the passage beside the stream; ``Primed`` follows.

    A prime that fails is no event: the stream goes on without the passage.

    Attributes:
        min_cached_tokens: precondition, as of a local turn.
    """

    worker: WorkerView
    min_cached_tokens: int


@final
class Note(msgspec.Struct, frozen=True, gc=False):
    """Note a worker's success or failure; nothing else is to be done.

    Attributes:
        credited: a worker that has done its part.
        worker: that failed, for ``reason``.
        blamed: the failure is held against it.
    """

    credited: WorkerView | None = None
    worker: WorkerView | None = None
    reason: Failure | None = None
    blamed: bool = False


@final
class Finish(msgspec.Struct, frozen=True, gc=False):
    """The request has ended; nothing follows.

    Attributes:
        error: for the client, if nothing of an answer was relayed; else why the stream could not
            go on. None if the client has its answer, or is gone.
        credited: a worker that has done its part; closes its circuit breaker.
        blamed: a worker that has failed; counts for its circuit breaker.
    """

    outcome: Outcome
    error: PpdError | None = None
    credited: WorkerView | None = None
    blamed: WorkerView | None = None


Effect = Send | Append | Abandon | Relay | Prime | Note | Finish
