"""Outages of simulated workers: which one dies, when, and for how long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ppd.errors import ConfigError

_FORM = re.compile(r"(\w{1,32})@(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Outage:
    """One worker dies, and starts again with an empty KV cache.

    Attributes:
        worker: its name: ``p0``, ``d0``, ``a0`` (a decode worker that appends), ``r0``, ...
        at_s: when it dies, in simulated time.
        for_s: how long it is gone.
    """

    worker: str
    at_s: float
    for_s: float

    @classmethod
    def parse(cls, text: str) -> Outage:
        """Read an outage as the command line writes it: ``a0@30+10``.

        Raises:
            ConfigError: the text has another form, or the duration is 0.
        """
        found = _FORM.fullmatch(text)
        if found is None or float(found[3]) == 0:
            raise ConfigError(f"no such outage: {text!r}; it is WORKER@AT_S+FOR_S, as a0@30+10")
        return cls(found[1], float(found[2]), float(found[3]))


def check(outages: Sequence[Outage]) -> None:
    """Check that the outages of each worker follow each other.

    Raises:
        ConfigError: two of them overlap.
    """
    by_time = sorted(outages, key=lambda one: (one.worker, one.at_s))
    for one, other in pairwise(by_time):
        if one.worker == other.worker and one.at_s + one.for_s >= other.at_s:
            raise ConfigError(f"two outages of {one.worker} overlap: {one} and {other}")
