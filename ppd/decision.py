"""Where a turn is prefilled: the decision, its reasons, and the policies.

``decide`` is the only way in. It settles what no policy may choose (a first turn has
nothing to append to), and asks the policy for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, assert_never


class Route(StrEnum):
    """``REMOTE`` is the paper's x=0 (prefill worker, then KV transfer), ``LOCAL`` its x=1."""

    REMOTE = "remote"
    LOCAL = "local"


class Reason(StrEnum):
    """Why a turn took its route; metrics, logs and response headers use the same words."""

    FIRST_TURN = "first_turn"  # no earlier request is a prefix of this one
    BATCH = "batch"  # several prompts in one request have no one home
    SHORT_PREFIX = "short_prefix"  # too little is known of it to be worth a home
    HOME_GONE = "home_gone"  # the worker with the KV is down, has restarted, or dropped the turn
    HOME_UNPATCHED = "home_unpatched"  # its handshake does not offer local prefill
    REFUSED_BY_WORKER = "refused_by_worker"  # it no longer held the prefix
    POLICY_PD = "policy_pd"
    POLICY_FULL = "policy_full"


class HomeState(StrEnum):
    READY = "ready"
    GONE = "gone"
    UNPATCHED = "unpatched"


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a turn when its route is decided. All sizes in tokens.

    Attributes:
        turn: from 1.
        context_tokens: KV of the conversation that the home worker is believed to hold.
        least_cached_tokens: what it must still hold for a local turn.
        new_tokens: estimate of the input that follows.
        prefill_tokens: how much of the conversation the prefill worker has computed.
        page_size: of the home worker's KV cache.
    """

    turn: int
    context_tokens: int
    least_cached_tokens: int
    new_tokens: int
    prefill_tokens: int
    page_size: int
    home: HomeState


@dataclass(frozen=True, slots=True)
class Decision:
    route: Route
    reason: Reason


class Policy(Protocol):
    """Chooses the route of a turn 2+ whose home worker is ready."""

    @property
    def name(self) -> str: ...

    def choose(self, features: Features) -> Decision: ...


@dataclass(frozen=True, slots=True)
class AlwaysRemote:
    """``pd``: every turn through the prefill worker (x=0)."""

    name: str = "pd"

    def choose(self, features: Features) -> Decision:
        return Decision(Route.REMOTE, Reason.POLICY_PD)


@dataclass(frozen=True, slots=True)
class AlwaysLocal:
    """``full``: every later turn on the decode worker that holds its KV (x=1)."""

    name: str = "full"

    def choose(self, features: Features) -> Decision:
        return Decision(Route.LOCAL, Reason.POLICY_FULL)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (AlwaysRemote(), AlwaysLocal())}


def decide(features: Features | None, policy: Policy) -> Decision:
    """The route of a turn; ``features`` is None if no earlier request is a prefix of it."""
    if features is None:
        return Decision(Route.REMOTE, Reason.FIRST_TURN)
    match features.home:
        case HomeState.GONE:
            return Decision(Route.REMOTE, Reason.HOME_GONE)
        case HomeState.UNPATCHED:
            return Decision(Route.REMOTE, Reason.HOME_UNPATCHED)
        case HomeState.READY:
            if features.least_cached_tokens == 0:
                # "Hello" begins thousands of prompts. Without a precondition a local turn could
                # be a whole first prefill, and all of them would meet on one worker.
                return Decision(Route.REMOTE, Reason.SHORT_PREFIX)
            return policy.choose(features)
        case _:
            assert_never(features.home)


# A chat template or a tokenizer may cut the seam between an old prompt and the reply
# differently; so many tokens may be lost there without the local route losing its point.
_SEAM_TOKENS = 32


def predicted_cached_tokens(context_tokens: int, page_size: int) -> int:
    """What the engine will report as cached if all of the context is still there."""
    return context_tokens // page_size * page_size


def least_cached_tokens(prompt_tokens: int, page_size: int) -> int:
    """The precondition of a local turn: the earlier prompt, less what a seam may cost.

    The reply is not part of it. Its text may come back edited, or tokenized otherwise,
    and the turn is still best served where the prompt is.
    """
    return predicted_cached_tokens(max(0, prompt_tokens - _SEAM_TOKENS), page_size)
