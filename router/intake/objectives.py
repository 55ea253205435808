"""The objective of a request: its tenant's weights or targets, or those of its headers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ppd.errors import RequestError
from ppd.score import Objective, Targets

from ..config.options import RouterConfig

WEIGHT_HEADERS = {
    "ttft": "X-PPD-W-TTFT",
    "tpot": "X-PPD-W-TPOT",
    "throughput": "X-PPD-W-THROUGHPUT",
}
TARGET_HEADERS = {"ttft_ms": "X-SLO-TTFT-MS", "tpot_ms": "X-SLO-TPOT-MS"}  # llm-d's names

_NAMES = {name.lower() for name in (*WEIGHT_HEADERS.values(), *TARGET_HEADERS.values())}


class Objectives:
    """The configured objectives of all tenants."""

    def __init__(self, config: RouterConfig) -> None:
        self._everyone: Objective = config.targets or config.weights
        self._weights, self._targets = config.weights, config.targets or Targets()
        self._tenants = config.tenants

    def of(self, tenant: str, headers: Mapping[str, str]) -> Objective:
        """The objective of a request.

        Args:
            tenant: its sender.
            headers: by lower-case name.

        Raises:
            RequestError: a header holds no number, or headers contradict each other.
        """
        objectives = self._tenants.get(tenant)
        if _NAMES.isdisjoint(headers):
            return (objectives.objective if objectives else None) or self._everyone
        weights, targets = _numbers(headers, WEIGHT_HEADERS), _numbers(headers, TARGET_HEADERS)
        if weights and targets:
            raise RequestError(f"give weights or targets, not both: {[*weights, *targets]}")
        objective: Objective
        if targets:
            objective = msgspec.structs.replace(
                (objectives.targets if objectives else None) or self._targets, **targets
            )
        else:
            objective = msgspec.structs.replace(
                (objectives.weights if objectives else None) or self._weights, **weights
            )
        if problem := objective.problem():
            raise RequestError(f"headers {', '.join(_given(headers))}: {problem}")
        return objective


def _numbers(headers: Mapping[str, str], names: Mapping[str, str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for field, name in names.items():
        given = headers.get(name.lower())
        if given is not None:
            try:
                numbers[field] = float(given)
            except ValueError:
                raise RequestError(f"{name} must be a number, got {given!r}") from None
    return numbers


def _given(headers: Mapping[str, str]) -> list[str]:
    names = [*WEIGHT_HEADERS.values(), *TARGET_HEADERS.values()]
    return [name for name in names if name.lower() in headers]
