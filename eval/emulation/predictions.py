"""What a turn should take on an emulated cluster, computed from the profile alone.

Nothing here is shared with the hooks but the profile: these are sums on paper, written down before
a run. Workers are idle but for the decodes beside the turn, and no transfer waits for another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from ..profiles.profile import Extend, Profile, Step

NEW_TOKENS = 200  # of a later turn
REPLY_TOKENS = 4


class Way(StrEnum):
    """How a turn is served.

    ``turn1``: a first turn, prefilled and transferred whole. ``full``: a later turn whose KV is
    transferred whole. ``delta``: the decode worker takes what it lacks. ``local``: an append.
    """

    TURN1 = "turn1"
    FULL = "full"
    DELTA = "delta"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the check.

    Attributes:
        context_tokens: before the new ones; of a first turn, its prompt and its reply.
        decodes: sequences that decode beside it.
    """

    way: Way
    context_tokens: int
    link_gbps: float
    decodes: int

    @property
    def name(self) -> str:
        """A name for it, as in ``delta 8k 25Gb/s beside 32``."""
        beside = f"beside {self.decodes}" if self.decodes else "alone"
        size = f"{self.context_tokens // 1024}k"
        return f"{self.way.value} {size} {self.link_gbps:g}Gb/s {beside}"

    @property
    def route(self) -> str:
        """Where the prefill runs: ``local`` on the decode worker, else ``remote``."""
        return "local" if self.way is Way.LOCAL else "remote"

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt."""
        if self.way is Way.TURN1:
            return self.context_tokens - REPLY_TOKENS
        return self.context_tokens + NEW_TOKENS

    @property
    def extend(self) -> Extend:
        """What is prefilled. The decode worker has the reply's KV, the prefill worker has not."""
        match self.way:
            case Way.TURN1:
                cached = 0
            case Way.FULL | Way.DELTA:
                cached = self.context_tokens - REPLY_TOKENS
            case Way.LOCAL:
                cached = self.context_tokens
            case _:
                assert_never(self.way)
        return Extend(self.prompt_tokens - cached, cached)

    @property
    def moved_tokens(self) -> int:
        """The tokens whose KV is transferred."""
        match self.way:
            case Way.TURN1 | Way.FULL:
                return self.prompt_tokens
            case Way.DELTA:
                return NEW_TOKENS
            case Way.LOCAL:
                return 0
            case _:
                assert_never(self.way)


def decode_ms(profile: Profile, decodes: int, context_tokens: int) -> float:
    """Return the milliseconds of a decode step of sequences of equal context."""
    return profile.step_ms(Step((), decodes, decodes * context_tokens))


def predicted_ttft_ms(
    profile: Profile, cell: Cell, chunk_tokens: int, decode_context_tokens: int
) -> float:
    """Return the TTFT of a cell in milliseconds.

    A turn beside decodes is sent in the middle of a decode step. The decode worker takes it up when
    that step ends. With overlap scheduling another step has been launched by then. So a local
    chunk runs after that one. A transfer that has arrived is taken up when a step ends.

    Args:
        chunk_tokens: the largest chunk of the prefill worker; a chunk's transfer runs beside the
            next chunk.
        decode_context_tokens: the mean context of the decodes beside it.
    """
    extend = cell.extend
    if cell.way is Way.LOCAL:
        beside = cell.decodes * decode_context_tokens
        own_ms = profile.step_ms(Step((extend,), cell.decodes, beside))
        if not cell.decodes:
            return own_ms
        return 1.5 * decode_ms(profile, cell.decodes, decode_context_tokens) + own_ms
    arrived_ms = _arrival_ms(profile, cell, chunk_tokens)
    if not cell.decodes:
        return arrived_ms
    step_ms = decode_ms(profile, cell.decodes, decode_context_tokens)
    return step_ms * (0.5 + math.ceil(arrived_ms / step_ms))


def _arrival_ms(profile: Profile, cell: Cell, chunk_tokens: int) -> float:
    """Prefill in chunks, each sent when it is computed, over an idle link."""
    extend, computed_ms, link_free_ms = cell.extend, 0.0, 0.0
    left, moved = extend.new_tokens, 0
    # What the prefill worker holds already goes with the first chunk.
    held = cell.moved_tokens - extend.new_tokens
    while left:
        tokens = min(left, chunk_tokens)
        computed_ms += profile.step_ms(
            Step((Extend(tokens, extend.cached_tokens + extend.new_tokens - left),))
        )
        left -= tokens
        sent = tokens + (held if not moved else 0)
        moved += sent
        link_free_ms = max(link_free_ms, computed_ms) + profile.transfer_ms(sent, cell.link_gbps)
    return link_free_ms
