"""Policies that need no table: the fixed ones, and the rules that others ship."""

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
    """``replica``: no disaggregation; each conversation on one worker that does both."""

    opening = Route.REPLICA

    def choose(self, features: Features, objective: Objective) -> Decision:
        return Decision(Route.REPLICA, Reason.POLICY_REPLICA)


class AlwaysRemote(Policy):
    """``pd``: every turn through the prefill worker (x=0)."""

    def choose(self, features: Features, objective: Objective) -> Decision:
        return Decision(Route.REMOTE, Reason.POLICY_PD)


class AlwaysLocal(Policy):
    """``full``: every later turn on the decode worker that holds its KV (x=1)."""

    def choose(self, features: Features, objective: Objective) -> Decision:
        return Decision(Route.LOCAL, Reason.POLICY_FULL)


@dataclass(frozen=True, slots=True)
class Partial(Policy):
    """``partial:SHARE``: that share of the conversations local, for all their later turns.

    Which ones is a hash of the session's name: the same ones every time.
    """

    share: float

    def choose(self, features: Features, objective: Objective) -> Decision:
        at = xxhash.xxh3_64_intdigest(features.session.encode()) / 2**64
        route = Route.LOCAL if at < self.share else Route.REMOTE
        return Decision(route, Reason.POLICY_PARTIAL)


@dataclass(frozen=True, slots=True)
class DynamoThreshold(Policy):
    """``threshold``: NVIDIA Dynamo's conditional disaggregation, by its documented defaults.

    Local if fewer than ``max_uncached`` tokens, and less than ``max_share`` of the prompt, are
    not cached at home; also if the prefill worker is ``busy`` with more tokens than that (None:
    never). Not if the home has no KV left for them.
    """

    max_uncached: int = 2048
    max_share: float = 0.7
    busy: int | None = None

    def choose(self, features: Features, objective: Objective) -> Decision:
        uncached = features.uncached_at_home
        short = uncached < self.max_uncached and uncached < self.max_share * features.prompt_tokens
        busy = self.busy is not None and features.prefill_queue_tokens > self.busy
        route = Route.LOCAL if (short or busy) and features.fits_at_home else Route.REMOTE
        return Decision(route, Reason.POLICY_THRESHOLD)


@dataclass(frozen=True, slots=True)
class UncachedThreshold(Policy):
    """``threshold:uncached=TOKENS``: llm-d's prefix-based decider; local below so many."""

    max_uncached: int

    def choose(self, features: Features, objective: Objective) -> Decision:
        few = features.uncached_at_home < self.max_uncached
        return Decision(Route.LOCAL if few else Route.REMOTE, Reason.POLICY_THRESHOLD)


def static_policy(spec: str) -> Policy:
    """The policy that ``--policy`` names, other than the table's.

    Raises:
        ConfigError: no such policy, or its argument is wrong.
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
