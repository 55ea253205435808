"""Where a turn is prefilled: routes, reasons, what a policy sees and what it answers.

``decide`` is the only way in. It settles what no policy may choose (a first turn has
nothing to append to), and asks the policy for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import msgspec

from ppd.prefill_times import PrefillTimes
from ppd.score import Objective, Score
from ppd.table import Costs


class Route(StrEnum):
    """``REMOTE`` is the paper's x=0 (prefill worker, then KV transfer), ``LOCAL`` its x=1.

    ``REPLICA`` is a worker that does both, as without disaggregation (the paper's R).
    """

    REMOTE = "remote"
    LOCAL = "local"
    REPLICA = "replica"


class Reason(StrEnum):
    """Why a turn took its route; metrics, logs and response headers use the same words.

    Attributes:
        description: of the reason, for operators.
    """

    description: str

    def __new__(cls, value: str, description: str) -> Reason:
        """Make a member whose value is the word and not the pair."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    FIRST_TURN = "first_turn", "no earlier request is a prefix of this one"
    BATCH = "batch", "several prompts in one request have no one home"
    SHORT_PREFIX = "short_prefix", "too little of it is known to be worth a home"
    HOME_GONE = (
        "home_gone",
        "the home is down, draining, failing, restarted or flushed, or has failed this turn",
    )
    EVICTED = "evicted", "the home worker has dropped the prefix, by its KV events"
    HOME_UNPATCHED = (
        "home_unpatched",
        "the home worker runs without the plugin: it offers no local prefill",
    )
    UNKNOWN_RANK = (
        "unknown_rank",
        "behind a gateway: which of the home's data-parallel ranks has the prefix is not known",
    )
    MEDIA = "media", "images, audio and video are not prefilled locally"
    HOME_REPLICA = (
        "home_replica",
        "the home is a replica, in a cluster with prefill and decode workers",
    )
    RESUMED = "resumed", "the worker was lost in mid-stream: another one generates the rest"
    APPENDED = (
        "appended",
        "a passage was found in mid-stream: the reply goes on behind it on the same worker",
    )
    NO_PREFILL = (
        "no_prefill",
        "decode fallback: no prefill worker is left, a decode worker prefills the whole prompt",
    )
    PREFILL_DOWN = "prefill_down", "no prefill worker is ready, and the home can serve the turn"
    REFUSED_BY_WORKER = (
        "refused_by_worker",
        "the home no longer held the prefix, or had enough appends under way",
    )
    POLICY_REPLICA = "policy_replica", "the policy sends every turn to a replica"
    POLICY_PD = "policy_pd", "the policy sends every turn through a prefill worker"
    POLICY_FULL = "policy_full", "the policy takes every later turn locally"
    POLICY_PARTIAL = "policy_partial", "the policy takes a share of the later turns locally"
    POLICY_THRESHOLD = "policy_threshold", "the policy compares the new tokens with a threshold"
    TABLE = "table", "by the measured cell"
    UNKNOWN_CELL = (
        "unknown_cell",
        "the table has no such cell, or there is no table: by the threshold rule",
    )
    INTERPOLATION = "interpolation", "the cells around, taken together, turned the table's answer"
    STALE_PREFIX = (
        "stale_prefix",
        "the prefill worker has missed turns and must catch up; that turned the answer",
    )
    LOAD = (
        "load",
        "queues and batches differ from those of the measurement; that turned the answer",
    )
    NOISE = "noise", "remote was better by less than the error of the measurements"
    OBSERVED = "observed", "costs observed since then turned the answer"
    APPEND_BUDGET = "append_budget", "enough appends are under way on the home worker"
    HOME_FULL = "home_full", "KV on the home worker would come too late for the turn"


class HomeState(StrEnum):
    """Whether the worker that holds a conversation's KV can take its next turn."""

    READY = "ready"
    GONE = "gone"
    UNPATCHED = "unpatched"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a turn when its route is decided; all sizes in tokens.

    Attributes:
        session: names the conversation.
        turn: number of the turn in its conversation, from 1.
        context_tokens: KV of the conversation that the home worker was left with.
        evicted_tokens: the part of it that the home is known to have dropped since.
        earlier_prompt_tokens: the part of it that was the last turn's prompt.
        new_tokens: estimate of the input that follows.
        output_tokens: forecast of the reply (``ppd.forecast``).
        prefill_cached_tokens: tokens of the conversation that the prefill worker of a remote turn
            has cached.
        prefill_queue_tokens: tokens that this worker was sent and has not answered yet.
        prefill_wait_ms: how long a remote turn waits for them; None: no table gives their times.
        qps: turns a second for each decode worker (``ppd.arrivals``).
        home: whether the worker that holds the KV can take the turn.
        page_size: tokens of a page of the home worker's KV cache.
        home_running: requests decoding there.
        home_append_tokens: of local turns that wait or prefill there.
        home_claimed_tokens: those, and what other routers may have admitted unseen.
        home_free_tokens: KV it has left without the appends; evictable cache counts as free. None:
            no report.
        has_media: whether the prompt has images, audio or video, in this turn or an earlier one.
        has_prefill: whether a prefill worker is ready.
    """

    session: str
    turn: int
    context_tokens: int
    earlier_prompt_tokens: int
    new_tokens: int
    output_tokens: int
    prefill_cached_tokens: int
    prefill_queue_tokens: int
    qps: float
    home: HomeState
    page_size: int
    home_running: int
    home_append_tokens: int
    home_free_tokens: int | None
    evicted_tokens: int = 0
    home_claimed_tokens: int = 0
    has_media: bool = False
    prefill_wait_ms: float | None = None
    has_prefill: bool = True

    @property
    def held_tokens(self) -> int:
        """KV of the conversation that the home is believed to hold."""
        return self.context_tokens - self.evicted_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.context_tokens + self.new_tokens

    @property
    def uncached_at_home(self) -> int:
        """Tokens of the prompt that a local turn computes."""
        return self.prompt_tokens - predicted_cached_tokens(self.held_tokens, self.page_size)

    @property
    def uncached_at_prefill(self) -> int:
        """Tokens of the prompt that a remote turn computes."""
        return self.prompt_tokens - min(self.prefill_cached_tokens, self.context_tokens)

    @property
    def home_lacks_tokens(self) -> int:
        """KV that the home lacks for the whole turn, as far as it reports.

        The context counts as free there until a request holds it.
        """
        if self.home_free_tokens is None:
            return 0
        claimed = max(self.home_append_tokens, self.home_claimed_tokens)
        needed = claimed + self.prompt_tokens + self.output_tokens
        return max(0, needed - self.home_free_tokens)

    @property
    def missed_tokens(self) -> int:
        """Tokens of the last prompt that the prefill worker has not computed."""
        return max(0, self.earlier_prompt_tokens - self.prefill_cached_tokens)

    @property
    def reply_tokens(self) -> int:
        """Tokens of the last reply that the prefill worker has not computed."""
        computed = max(self.earlier_prompt_tokens, self.prefill_cached_tokens)
        return max(0, self.context_tokens - computed)

    @property
    def min_cached_tokens(self) -> int:
        """What the home must still hold for a local turn."""
        return min_cached_tokens(self.earlier_prompt_tokens, self.page_size)


@dataclass(frozen=True, slots=True)
class Assessment:
    """The costs of a turn as they were compared, after corrections."""

    cell: str
    remote: Costs
    local: Costs
    score: Score


class Decision(msgspec.Struct, frozen=True):
    """A route and its reason.

    Attributes:
        assessment: what the table gave; None where none was used, or it has no such cell.
    """

    route: Route
    reason: Reason
    assessment: Assessment | None = None


class Policy(ABC):
    """Chooses the route of a turn 2+ whose home worker is ready.

    Attributes:
        opening: the route of turns without a home that could continue them.
        prefill_times: of prefill workers; None without a table.
    """

    opening: Route = Route.REMOTE
    prefill_times: PrefillTimes | None = None

    @abstractmethod
    def choose(self, features: Features, objective: Objective) -> Decision:
        """The route of a turn whose home is ready."""

    def observe(
        self, features: Features, route: Route, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        """Take what a turn took on the route that was chosen; static policies ignore it.

        Args:
            features: of the turn.
            route: that was chosen.
            ttft_ms: from the decision; None for a turn that did not stream.
            tpot_ms: None for a reply of one token, and for one that was not decoded by the worker
                that the features describe.
        """
        return


def may_be_local(features: Features) -> bool:
    """Whether a policy is asked for the turn's route: its home could take it."""
    return (
        features.home is HomeState.READY
        and 0 < features.min_cached_tokens <= features.held_tokens
        and not features.has_media
    )


_VIA_REPLICA = Route.REPLICA
_FIRST_TURN = Reason.FIRST_TURN  # an enum's attribute is slow to look up (Python 3.11)


def decide(
    features: Features | None, policy: Policy, objective: Objective, opening: Route | None = None
) -> Decision:
    """The route of a turn.

    Args:
        features: None if no earlier request is a prefix of it.
        policy: asked where nothing else settles the route.
        objective: of the request.
        opening: of turns without a usable home, where the cluster has both kinds of worker;
            None: the policy's.
    """
    opening = opening or policy.opening
    if features is None:
        return Decision(opening, _FIRST_TURN)
    match features.home:
        case HomeState.GONE:
            return Decision(opening, Reason.HOME_GONE)
        case HomeState.UNPATCHED:
            return Decision(opening, Reason.HOME_UNPATCHED)
        case HomeState.REPLICA:
            return Decision(Route.REPLICA, Reason.HOME_REPLICA)
        case HomeState.READY:
            if features.min_cached_tokens == 0:
                # "Hello" begins thousands of prompts. Without a precondition a local turn could
                # be a whole first prefill, and all of them would meet on one worker.
                return Decision(opening, Reason.SHORT_PREFIX)
            if features.held_tokens < features.min_cached_tokens:
                return Decision(opening, Reason.EVICTED)  # it would be refused
            if features.has_media:
                return Decision(opening, Reason.MEDIA)  # so would this
            if not features.has_prefill and policy.opening is not _VIA_REPLICA:
                return Decision(Route.LOCAL, Reason.PREFILL_DOWN)
            return policy.choose(features, objective)
        case _:
            assert_never(features.home)


# A chat template or a tokenizer may cut the seam between an old prompt and the reply
# differently; so many tokens may be lost there without the local route losing its point.
_SEAM_TOKENS = 32


def predicted_cached_tokens(context_tokens: int, page_size: int) -> int:
    """What the engine will report as cached if all of the context is still there."""
    return context_tokens // page_size * page_size


def min_cached_tokens(prompt_tokens: int, page_size: int) -> int:
    """The precondition of a local turn: the earlier prompt, less what a seam may cost.

    The reply is not part of it. Its text may come back edited, or tokenized otherwise,
    and the turn is still best served where the prompt is.
    """
    return predicted_cached_tokens(max(0, prompt_tokens - _SEAM_TOKENS), page_size)
