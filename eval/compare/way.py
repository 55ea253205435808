"""One of the ways that are compared: a policy, and the objective it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from ppd.score import Objective, Targets, Weights

_TARGETS = " ms"  # ends the label of targets


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways that are compared."""

    policy: str
    objective: Objective | None = None

    @property
    def name(self) -> str:
        """The name in rows and tables: the policy, with its objective if it has one."""
        return self.policy if self.objective is None else f"{self.policy} {label(self.objective)}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that give a request its objective."""
        named: dict[str, float | None]
        match self.objective:
            case None:
                return {}
            case Weights(ttft, tpot):
                named = {"X-PPD-W-TTFT": ttft, "X-PPD-W-TPOT": tpot}
            case Targets(ttft_ms, tpot_ms):
                named = {"X-SLO-TTFT-MS": ttft_ms, "X-SLO-TPOT-MS": tpot_ms}
            case _:
                assert_never(self.objective)
        return {name: f"{value:g}" for name, value in named.items() if value is not None}


def label(objective: Objective) -> str:
    """Return the name of an objective, with six digits: ``1:3``, or ``500/30 ms``."""
    match objective:
        case Weights(ttft, tpot):
            return f"{ttft:g}:{tpot:g}"
        case Targets(ttft_ms, tpot_ms):
            given = ["-" if target is None else f"{target:g}" for target in (ttft_ms, tpot_ms)]
            return "/".join(given) + _TARGETS
        case _:
            assert_never(objective)


def parse(text: str) -> Objective:
    """Return the objective that has this label."""
    if not text.endswith(_TARGETS):
        ttft, tpot = map(float, text.split(":"))
        return Weights(ttft, tpot)
    ttft_ms, tpot_ms = (
        None if target == "-" else float(target)
        for target in text.removesuffix(_TARGETS).split("/")
    )
    return Targets(ttft_ms, tpot_ms)
