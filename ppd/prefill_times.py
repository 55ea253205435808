"""What a prompt takes on a prefill worker and its link, from the quiet times of a decision table.

A worker computes a token in a time of its own, and attends to all tokens before it. So the time of
a prompt has a linear and a square part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Times of a prefill worker, in ms.

    Attributes:
        token_ms: to compute a token that has none before it.
        attention_ms: more, for each token before it.
        transfer_ms: of a token's KV.
    """

    token_ms: float
    attention_ms: float
    transfer_ms: float

    def compute_ms(self, cached: float, new: float) -> float:
        """Return what the tokens of a prompt take that are not cached."""
        return new * (self.token_ms + self.attention_ms * (cached + new / 2.0))


def prefill_times(
    contexts: Sequence[float],
    news: Sequence[float],
    local_ms: Callable[[float, float], float],
    append_ms: float,
    first_turn_ms: float,
) -> PrefillTimes:
    """Find the times in what local turns at rest and first turns took.

    Args:
        contexts: tokens before the turns that were measured, ascending.
        news: tokens that they add, ascending.
        local_ms: TTFT at rest of a local turn, by both.
        append_ms: what one more new token adds to it. It counts where the turns do not show it.
        first_turn_ms: what one more token adds to the TTFT of a first turn, with its transfer.
    """
    few, many = news[0], news[-1]
    short, long = contexts[0], contexts[-1]
    token_ms, attention_ms = append_ms, 0.0
    if many > few and long > short:
        by_context = (local_ms(long, many) - local_ms(short, many)) / (long - short)
        attention = max(0.0, by_context / many)
        by_new = (local_ms(short, many) - local_ms(short, few)) / (many - few)
        alone = by_new - attention * (short + (many + few) / 2.0)
        if alone > 0.0:
            token_ms, attention_ms = alone, attention
    slope = token_ms
    if long > short:
        appending = PrefillTimes(token_ms, attention_ms, 0.0)
        prompts_ms = [appending.compute_ms(0.0, context) for context in contexts]
        slope = linear_regression(contexts, prompts_ms).slope
    if slope > first_turn_ms:  # prefill workers are faster than appends
        faster = first_turn_ms / slope
        return PrefillTimes(token_ms * faster, attention_ms * faster, 0.0)
    return PrefillTimes(token_ms, attention_ms, first_turn_ms - slope)
