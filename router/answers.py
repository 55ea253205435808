"""Errors as clients get them: OpenAI's error object, with a status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ppd.errors import EngineError, Overloaded, RequestError, WorkerError
from ppd.outcome import Outcome

from .wire.request import STOPPING

logger = logging.getLogger("ppd.router")

INVALID = "invalid_request_error"  # OpenAI's type of a client's error
_LATER = "rate_limit_error"


class ErrorObject(msgspec.Struct):
    """OpenAI's error object.

    Attributes:
        message: what is wrong, for people.
        type: ``invalid_request_error`` (the client's), ``rate_limit_error`` (try again later),
            ``worker_error`` (a worker is lost, missing or silent), ``router_error`` (the router
            stops, or has a bug), or an engine's own.
        param: the field at fault; null if the error is of no field.
        code: machine-readable; null if there is none.
    """

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct):
    """The body of an error."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error for a client.

    Attributes:
        outcome: how the request ends with it.
        headers: beside the content type.
    """

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | int | None = None
    outcome: Outcome = Outcome.REJECTED
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """OpenAI's error object, as JSON."""
        return msgspec.json.encode(
            ErrorBody(ErrorObject(self.message, self.kind, self.param, self.code))
        )

    @property
    def event(self) -> bytes:
        """As the last event but ``[DONE]`` of a stream."""
        return b"data: %b\n\n" % self.body


STOPPING_ANSWER = ErrorAnswer(503, STOPPING, "router_error", code=503)


def answer_to(error: Exception, where: str) -> ErrorAnswer:
    """The answer to an error; an unexpected one is logged.

    Args:
        error: as it was raised.
        where: of the request, for the log.
    """
    match error:
        case Overloaded():
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            kind, code = _LATER, error.code
            return ErrorAnswer(
                error.status,
                str(error),
                kind,
                code=code,
                outcome=Outcome.OVERLOADED,
                headers=headers,
            )
        case RequestError():
            return ErrorAnswer(error.status, str(error), INVALID, error.param, error.code)
        case EngineError():
            kinds = {Outcome.REJECTED: INVALID, Outcome.OVERLOADED: _LATER}
            after_s = error.retry_after_s
            return ErrorAnswer(
                error.status,
                error.message,
                kinds.get(error.outcome, error.kind),
                outcome=error.outcome,
                headers={} if after_s is None else {"Retry-After": str(after_s)},
            )
        case WorkerError():
            return ErrorAnswer(503, str(error), "worker_error", outcome=Outcome.WORKER_ERROR)
        case _:
            logger.error("%s failed", where, exc_info=error)
            return internal_error(type(error).__name__)


def internal_error(what: str) -> ErrorAnswer:
    """The answer to a request that a bug of the router has ended.

    Args:
        what: failed, in a word or two.
    """
    message = f"internal error of the router ({what})"
    return ErrorAnswer(500, message, "router_error", outcome=Outcome.INTERNAL_ERROR)
