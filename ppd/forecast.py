"""Lengths that are unknown when a route is decided: predicted, and checked afterwards.

A reply's, from the conversation's own replies and those of its tenant, as means of logarithms
(lengths have long tails), each with recent replies counting more; it says how well it does.
And a first prompt's, of which only the bytes are known.
"""

from __future__ import annotations

import math
from collections import OrderedDict

_RECENT = 0.3  # weight of the newest reply in a mean
_MAX_TENANTS = 10_000
_UNKNOWN = 256.0  # tokens of a reply, before anything has been seen
_TOKENS_PER_BYTE = 0.25


def blend(usual_tokens: float | None, tokens: int) -> float:
    """The running mean after one more reply of ``tokens``; None: it is the first."""
    if usual_tokens is None:
        return float(max(1, tokens))
    old, new = math.log(usual_tokens), math.log(max(1, tokens))
    return math.exp(old + _RECENT * (new - old))


class Forecast:
    """Recent reply lengths by tenant (those of a conversation its ``Turn`` carries), and how many
    bytes make a token, by kind of prompt."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._tokens_per_byte: dict[str, float] = {}
        self._off: float | None = None

    def prompt_tokens(self, kind: str, prompt_bytes: int) -> int:
        """Tokens of a prompt nothing else is known of."""
        return round(prompt_bytes * self._tokens_per_byte.get(kind, _TOKENS_PER_BYTE))

    def learn_prompt(self, kind: str, prompt_bytes: int, tokens: int) -> None:
        seen = tokens / max(1, prompt_bytes)
        old = self._tokens_per_byte.get(kind, seen)
        self._tokens_per_byte[kind] = old + 0.1 * (seen - old)

    def reply_tokens(
        self, tenant: str, usual_tokens: float | None, max_reply_tokens: int | None
    ) -> int:
        """Tokens of the next reply.

        Args:
            usual_tokens: running mean of the conversation's replies; None: it has none.
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
            case own, known:  # a conversation's few replies are worth as much as its tenant's many
                assert known is not None
                tokens = math.sqrt(own * known)
        if max_reply_tokens is not None:
            tokens = min(tokens, max_reply_tokens)
        return max(1, round(tokens))

    def learn_reply(self, tenant: str, predicted: int | None, tokens: int) -> float | None:
        """A reply has ended. Returns by which factor the prediction was off, from 1; None
        without one."""
        self._tenants[tenant] = blend(self._tenants.get(tenant), tokens)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        if predicted is None:
            return None
        seen = max(1, tokens)
        factor = max(predicted / seen, seen / predicted)
        self._off = factor if self._off is None else self._off + 0.05 * (factor - self._off)
        return factor

    @property
    def typically_off(self) -> float | None:
        """Running mean of that factor; None before the first."""
        return self._off
