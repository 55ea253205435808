"""How large a chunk of append-prefill may be, so that running decodes keep their pace.

Owns a running estimate of what a chunk adds to the time between two decode steps, and the
choice that follows. Knows neither engine nor clock: steps come in as values. Sizes follow
Sarathi-Serve's observation (OSDI 2024, section 4) that a decode step has room for some prefill;
how much is learned here from the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Decodes that miss the target anyway are not slowed by more than this, nor those of a server
# without a target.
LEAST_SLOWDOWN = 1.25
# A chunk run between decode steps delays one token by all of its time: a token's gap may be so
# many targets, and the target holds over the decode steps until the next chunk.
_LONGEST_GAP = 2.0
_MOST_DECODE_STEPS = 16  # between two chunks: append-prefill must not starve either
_FIRST_TOKENS = 32  # of the first chunk beside decodes; later ones at most twice the largest tried
_PROBE_EVERY = 16  # mixed steps: then one of decodes alone, or their own time would be unknown
_DECODE_WEIGHT = 0.1  # of a new decode step in its moving average
_FORGET = 0.98  # of what chunks are known to cost, at each chunk
_OUTLIER = 4.0  # a step so many times longer than expected counts as that long


@dataclass(frozen=True, slots=True)
class Chunk:
    """What to run next: so many tokens, then so many decode steps without prefill."""

    tokens: int
    decode_steps: int


class ChunkCost:
    """Milliseconds that a chunk adds: ``a + b * tokens + c * tokens * context``, none negative.

    Least squares over exponentially forgotten chunks. The third term is attention's.
    """

    _TOKENS, _CONTEXT = 256.0, 4096.0  # scale the terms to about one

    def __init__(self) -> None:
        self._terms = [0.0, 0.0, 0.0]
        self._products = [[1e-3 * (i == j) for j in range(3)] for i in range(3)]
        self._targets = [0.0, 0.0, 0.0]
        self.chunks = 0

    def ms(self, tokens: int, context: float) -> float:
        """
        Args:
            context: tokens that each of ``tokens`` attends to, on average.
        """
        return sum(t * x for t, x in zip(self._terms, self._features(tokens, context), strict=True))

    def observe(self, tokens: int, context: float, ms: float) -> None:
        if self.chunks >= 8:
            ms = min(ms, _OUTLIER * max(self.ms(tokens, context), 1.0))
        self.chunks += 1
        features = self._features(tokens, context)
        for i in range(3):
            self._targets[i] = _FORGET * self._targets[i] + features[i] * ms
            for j in range(3):
                old = self._products[i][j]
                ridge = 1e-3 * (1 - _FORGET) * (i == j)  # what is forgotten of it is put back
                self._products[i][j] = _FORGET * old + ridge + features[i] * features[j]
        for _ in range(20):  # coordinate descent: each term its best, or 0
            for i in range(3):
                others = sum(self._products[i][j] * self._terms[j] for j in range(3) if j != i)
                self._terms[i] = max(0.0, (self._targets[i] - others) / self._products[i][i])

    def most_tokens(self, budget_ms: float, context: float, limit: int) -> int:
        """The largest chunk within a budget; 0 if there is none."""
        fixed = self._terms[0]
        each = self.ms(1, context) - fixed
        if each <= 0:
            return limit if fixed <= budget_ms else 0
        return max(0, min(limit, math.floor((budget_ms - fixed) / each)))

    def _features(self, tokens: int, context: float) -> tuple[float, float, float]:
        scaled = tokens / self._TOKENS
        return 1.0, scaled, scaled * context / self._CONTEXT


class Pacer:
    """Chooses chunk after chunk.

    Args:
        full_chunk: tokens of a chunk when nothing decodes, and never more.
        page_size: chunks are whole pages.
        mixed: a chunk runs in one forward with a decode step, not between two of them.
        target_ms: TPOT that running decodes shall keep; None: LEAST_SLOWDOWN of their own.
        fixed_chunk: tokens of every chunk beside decodes; then nothing is estimated.
    """

    def __init__(
        self,
        *,
        full_chunk: int,
        page_size: int,
        mixed: bool,
        target_ms: float | None = None,
        fixed_chunk: int | None = None,
    ) -> None:
        self.full_chunk = full_chunk
        self.page_size = page_size
        self.mixed = mixed
        self.target_ms = target_ms
        self.fixed_chunk = fixed_chunk
        self.decode_ms: float | None = None
        self.cost = ChunkCost()
        self._largest_tried = 0
        self._since_probe = 0

    def decoded(self, ms: float) -> None:
        """A decode step without prefill took ``ms``."""
        self._since_probe = 0
        ms = max(ms, 0.01)
        if self.decode_ms is None:
            self.decode_ms = ms
        else:
            ms = min(ms, _OUTLIER * self.decode_ms)
            self.decode_ms += _DECODE_WEIGHT * (ms - self.decode_ms)

    def chunked(self, tokens: int, context: float, ms: float) -> None:
        """A chunk ran beside decodes in ``ms``, those of their step included if mixed."""
        self._largest_tried = max(self._largest_tried, tokens)
        if not self.mixed:
            self.cost.observe(tokens, context, ms)
        elif self.decode_ms is not None:
            self._since_probe += 1
            self.cost.observe(tokens, context, max(0.0, ms - self.decode_ms))

    def next_chunk(self, rest: int, context: float) -> Chunk:
        """The next chunk beside running decodes.

        Args:
            rest: tokens of the request that is next, at least 1.
            context: tokens that it has before them.
        """
        if self.fixed_chunk is not None:
            return Chunk(self._pages(self.fixed_chunk), 0 if self.mixed else 1)
        if self.decode_ms is None:
            return Chunk(self._pages(_FIRST_TOKENS), 0 if self.mixed else 1)
        target_ms = max(self.target_ms or 0.0, LEAST_SLOWDOWN * self.decode_ms)
        budget_ms = target_ms - self.decode_ms
        gap_ms = budget_ms if self.mixed else _LONGEST_GAP * target_ms - self.decode_ms
        limit = min(self.full_chunk, max(_FIRST_TOKENS, 2 * self._largest_tried))
        tokens = self._pages(self.cost.most_tokens(gap_ms, context, limit))
        added_ms = self.cost.ms(min(tokens, rest), context)
        steps = max(1, min(_MOST_DECODE_STEPS, math.ceil(added_ms / budget_ms - 0.01)))
        if self.mixed:  # its own step is one of them
            steps -= 1
            if self._since_probe >= _PROBE_EVERY:
                steps = max(1, steps)
        return Chunk(tokens, steps)

    def _pages(self, tokens: int) -> int:
        """Whole pages, at least one, at most a full chunk."""
        least = max(1, min(16, self.full_chunk) // self.page_size)
        return max(least, min(tokens, self.full_chunk) // self.page_size) * self.page_size
