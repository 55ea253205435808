"""Policies that need no table: the fixed ones, and the rules of other systems."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from ppd.decision import Decision, Features, Policy, Reason, Route
from ppd.errors import ConfigError
from ppd.score import Objective

NAMES = (
    "replica",
    "pd",
    "full",
    "partial:SHARE",
    "threshold",
    "threshold:uncached=TOKENS",
    "threshold:busy=TOKENS",
)


class Replica(Policy):
    """``replica``: no disaggregation; each conversation stays on one replica worker."""

    opening = Route.REPLICA

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose the replica route for every turn."""
        return Decision(Route.REPLICA, Reason.POLICY_REPLICA)


class AlwaysRemote(Policy):
    """``pd``: every turn is prefilled by a prefill worker (x=0)."""

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose the remote route for every turn."""
        return Decision(Route.REMOTE, Reason.POLICY_PD)


class AlwaysLocal(Policy):
    """``full``: every later turn is prefilled by the decode worker that holds its KV (x=1)."""

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose the local route for every turn."""
        return Decision(Route.LOCAL, Reason.POLICY_FULL)


@dataclass(frozen=True, slots=True)
class Partial(Policy):
    """``partial:SHARE``: a fixed share of the conversations is local, for all their later turns.

    A hash of the session's name selects them, so they are the same ones in every run.

    Attributes:
        share: from 0 to 1.
    """

    share: float

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose the local route for sessions whose hash lies in the share."""
        at = xxhash.xxh3_64_intdigest(features.session.encode()) / 2**64
        route = Route.LOCAL if at < self.share else Route.REMOTE
        return Decision(route, Reason.POLICY_PARTIAL)


@dataclass(frozen=True, slots=True)
class DynamoThreshold(Policy):
    """``threshold``: NVIDIA Dynamo's conditional disaggregation, by its documented defaults.

    A turn is local if few tokens of its prompt are uncached at home, or if the prefill worker is
    busy. It is never local if the home has no KV left for these tokens.

    Attributes:
        max_uncached: fewer uncached tokens than that are few.
        max_share: they must also be a smaller share of the prompt than that.
        busy: the prefill worker is busy with more queued tokens than that; None for never.
    """

    max_uncached: int = 2048
    max_share: float = 0.7
    busy: int | None = None

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose a route by the uncached tokens, the prefill queue and the free KV."""
        uncached = features.uncached_at_home
        short = uncached < self.max_uncached and uncached < self.max_share * features.prompt_tokens
        busy = self.busy is not None and features.prefill_queue_tokens > self.busy
        route = Route.LOCAL if (short or busy) and not features.home_lacks_tokens else Route.REMOTE
        return Decision(route, Reason.POLICY_THRESHOLD)


@dataclass(frozen=True, slots=True)
class UncachedThreshold(Policy):
    """``threshold:uncached=TOKENS``: llm-d's prefix-based decider.

    Attributes:
        max_uncached: a turn with fewer uncached tokens at home is local.
    """

    max_uncached: int

    def choose(self, features: Features, objective: Objective) -> Decision:
        """Choose a route by the uncached tokens."""
        few = features.uncached_at_home < self.max_uncached
        return Decision(Route.LOCAL if few else Route.REMOTE, Reason.POLICY_THRESHOLD)


def static_policy(spec: str) -> Policy:
    """Build the policy that ``--policy`` names; every policy but the table's.

    Args:
        spec: the name, with an argument after a colon where the policy has one.

    Raises:
        ConfigError: there is no such policy, or its argument is wrong.
    """
    name, _, argument = spec.partition(":")
    match name, argument.partition("="):
        case "replica", ("", "", ""):
            return Replica()
        case "pd", ("", "", ""):
            return AlwaysRemote()
        case "full", ("", "", ""):
            return AlwaysLocal()
        case "threshold", ("", "", ""):
            return DynamoThreshold()
        case "threshold", ("uncached", "=", tokens):
            return UncachedThreshold(_tokens(spec, tokens))
        case "threshold", ("busy", "=", tokens):
            return DynamoThreshold(busy=_tokens(spec, tokens))
        case "partial", (share, "", ""):
            return Partial(_share(spec, share))
        case _:
            raise ConfigError(f"no such policy: {spec!r}; there are ppd, {', '.join(NAMES)}")


def _tokens(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise ConfigError(f"policy {spec!r}: TOKENS must be a whole number, got {text!r}")
    return int(text)


def _share(spec: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"policy {spec!r}: SHARE must be a number from 0 to 1, got {text!r}")
    return share
