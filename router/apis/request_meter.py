"""Requests beside the token path: charged, and counted once by how they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ppd.errors import Overloaded, RequestError, WorkerError
from ppd.outcome import Outcome


@dataclass(slots=True)
class Ending:
    outcome: Outcome = Outcome.OK


class RequestMeter:
    """
    Args:
        charge: a request with these headers, or refuses it.
        ended: told of a request's path and outcome.
    """

    def __init__(
        self,
        charge: Callable[[Mapping[str, str]], None],
        ended: Callable[[str, Outcome], None],
    ) -> None:
        self._charge = charge
        self._ended = ended

    @contextmanager
    def request(self, path: str, headers: Mapping[str, str]) -> Iterator[Ending]:
        """
        Args:
            path: as its route was added: there is a row of the metric for each.

        Raises:
            RequestError: who asks is not known, or may not ask now.
        """
        ending = Ending()
        try:
            self._charge(headers)
            yield ending
        except BaseException as error:
            ending.outcome = _outcome(error)
            raise
        finally:
            self._ended(path, ending.outcome)


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
