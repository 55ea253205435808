"""Rate limits and counts of requests outside the token path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ppd.errors import Overloaded, RequestError, WorkerError
from ppd.outcome import Outcome


@dataclass(slots=True)
class Ending:
    """The outcome of a request under way, which its handler may change."""

    outcome: Outcome = Outcome.OK


class RequestMeter:
    """Charges requests against rate limits, and counts each once by its outcome.

    Args:
        charge: charges a request with these headers, or raises a ``RequestError``.
        count: called with a request's path and outcome when it ends.
    """

    def __init__(
        self,
        charge: Callable[[Mapping[str, str]], None],
        count: Callable[[str, Outcome], None],
    ) -> None:
        self._charge = charge
        self._count = count

    @contextmanager
    def request(self, path: str, headers: Mapping[str, str]) -> Iterator[Ending]:
        """Charge a request, and count it when the context ends.

        Args:
            path: the path of its route, a label of the metric.
            headers: by lower-case name.

        Raises:
            RequestError: its key is unknown, or the tenant has reached its rate limit.
        """
        ending = Ending()
        try:
            self._charge(headers)
            yield ending
        except BaseException as error:
            ending.outcome = _outcome(error)
            raise
        finally:
            self._count(path, ending.outcome)


def _outcome(error: BaseException) -> Outcome:
    match error:
        case asyncio.CancelledError():
            return Outcome.DISCONNECTED
        case Overloaded():
            return Outcome.OVERLOADED
        case RequestError():
            return Outcome.REJECTED
        case WorkerError():
            return Outcome.WORKER_ERROR
        case _:
            return Outcome.INTERNAL_ERROR
