"""Predictions of lengths that are unknown when a route is decided.

The length of a reply is predicted from the conversation's own replies and those of its tenant.
Both are running means of logarithms, because lengths have long tails. Recent replies count more.
The error of the predictions is measured. The tokens of a first prompt are predicted from its bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict

_RECENT = 0.3  # weight of the newest reply in a mean
_MAX_TENANTS = 10_000
_UNKNOWN = 256.0  # predicted tokens of a reply before the first one
_TOKENS_PER_BYTE = 0.25


def blend(usual_tokens: float | None, tokens: int) -> float:
    """Update a running mean of reply lengths.

    Args:
        usual_tokens: the mean so far; None before the first reply.
        tokens: length of the new reply.
    """
    if usual_tokens is None:
        return float(max(1, tokens))
    old, new = math.log(usual_tokens), math.log(max(1, tokens))
    return math.exp(old + _RECENT * (new - old))


class Forecast:
    """Predicts reply lengths by tenant, and tokens per byte by kind of prompt.

    The caller keeps the mean of each conversation, in its ``Turn``.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._tokens_per_byte: dict[str, float] = {}
        self._off: float | None = None

    def prompt_tokens(self, kind: str, prompt_bytes: int) -> int:
        """The predicted tokens of a prompt, from its bytes and the kind of prompt."""
        return round(prompt_bytes * self._tokens_per_byte.get(kind, _TOKENS_PER_BYTE))

    def learn_prompt(self, kind: str, prompt_bytes: int, tokens: int) -> None:
        """Update the tokens per byte of a kind of prompt by one prompt."""
        ratio = tokens / max(1, prompt_bytes)
        old = self._tokens_per_byte.get(kind, ratio)
        self._tokens_per_byte[kind] = old + 0.1 * (ratio - old)

    def reply_tokens(
        self, tenant: str, usual_tokens: float | None, max_reply_tokens: int | None
    ) -> int:
        """The predicted tokens of the next reply.

        Args:
            tenant: the tenant of the conversation.
            usual_tokens: running mean of the conversation's replies; None before the first.
            max_reply_tokens: the request's own limit, if it has one.
        """
        of_tenant = self._tenants.get(tenant)
        match usual_tokens, of_tenant:
            case None, None:
                tokens = _UNKNOWN
            case None, known:
                assert known is not None
                tokens = known
            case own, None:
                tokens = own
            case own, known:  # a conversation's few replies weigh as much as its tenant's many
                assert known is not None
                tokens = math.sqrt(own * known)
        if max_reply_tokens is not None:
            tokens = min(tokens, max_reply_tokens)
        return max(1, round(tokens))

    def learn_reply(self, tenant: str, predicted: int | None, tokens: int) -> float | None:
        """Update the predictions by a reply that has ended.

        Returns:
            The factor by which ``predicted`` was off, at least 1; None without a prediction.
        """
        self._tenants[tenant] = blend(self._tenants.get(tenant), tokens)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        if predicted is None:
            return None
        actual = max(1, tokens)
        factor = max(predicted / actual, actual / predicted)
        self._off = factor if self._off is None else self._off + 0.05 * (factor - self._off)
        return factor

    @property
    def typically_off(self) -> float | None:
        """The running mean of the factors that ``learn_reply`` returned; None before the first."""
        return self._off
