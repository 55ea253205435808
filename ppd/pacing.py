"""How large a chunk of append-prefill may be, so that running decodes keep their pace.

Owns a running estimate of what a chunk adds to the time between two decode steps, and the
choice that follows. Knows neither engine nor clock: steps come in as values. Sizes follow
Sarathi-Serve's observation (OSDI 2024, section 4) that a decode step has room for some prefill;
how much is learned here from the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

# Decodes that miss the target anyway are not slowed by more than this, nor those of a server
# without a target.
MIN_SLOWDOWN = 1.5
# The target holds over a chunk and the decode steps after it; one token's gap may be planned so
# many targets long. A chunk has a price whatever its size (it reads its context's KV): many small
# ones would cost decodes more than few with steps between.
_LONGEST_GAP = 1.75
_LAST_CHUNK = 1.5  # it may be so much longer, if that makes it the last: no gap reaches 3 targets
_MIN_USE = 1.5  # nor does a chunk cost less than so many times that price
_MAX_DECODE_STEPS = 16  # from chunk to chunk: append-prefill must not starve either
_FIRST_TOKENS = 32  # of the first chunk beside decodes; later ones at most twice the largest tried
_PROBE_EVERY = 16  # chunks: then two steps of decodes alone, or their own time would be unknown
_DECODE_WEIGHT = 0.1  # of a new decode step in its moving average
_FORGET = 0.98  # of what chunks are known to cost, at each chunk
_RIDGE = 1e-3
_FEW = 8  # chunks
_OUTLIER = 4.0  # a step so many times longer than expected counts as that long


@dataclass(frozen=True, slots=True)
class Chunk:
    """What to run next: so many tokens, then so many decode steps without prefill."""

    tokens: int
    decode_steps: int


class ChunkCost:
    """Milliseconds that a chunk adds: ``a + b * context + (c + d * context) * tokens``, no term
    negative.

    Least squares over exponentially forgotten chunks. What grows with context is attention's:
    KV read once a chunk, and products for each token.
    """

    _TOKENS, _CONTEXT = 256.0, 4096.0  # scale the terms to about one

    def __init__(self) -> None:
        self._terms = [0.0] * 4
        self._products = [[_RIDGE * (i == j) for j in range(4)] for i in range(4)]
        self._targets = [0.0] * 4
        self.chunks = 0

    def ms(self, tokens: int, context: float) -> float:
        """
        Args:
            context: tokens that each of ``tokens`` attends to, on average.
        """
        return float(sum(map(mul, self._terms, self._features(tokens, context))))

    def observe(self, tokens: int, context: float, ms: float) -> None:
        if self.chunks >= _FEW:
            ms = min(ms, _OUTLIER * max(self.ms(tokens, context), 1.0))
        self.chunks += 1
        features = self._features(tokens, context)
        for i, row in enumerate(self._products):
            self._targets[i] = _FORGET * self._targets[i] + features[i] * ms
            for j in range(4):
                row[j] = _FORGET * row[j] + features[i] * features[j]
            row[i] += _RIDGE * (1 - _FORGET)  # what was forgotten of it
        terms = self._terms
        for _ in range(20):  # coordinate descent: each term its best, or 0
            for i, row in enumerate(self._products):
                others = sum(map(mul, row, terms)) - row[i] * terms[i]
                terms[i] = max(0.0, (self._targets[i] - others) / row[i])

    def fixed_ms(self, context: float) -> float:
        """Of a chunk however small."""
        return self.ms(0, context)

    def max_reply_tokens(self, budget_ms: float, context: float, limit: int) -> int:
        """The largest chunk within a budget; 0 if there is none."""
        fixed = self.fixed_ms(context)
        each = self.ms(1, context) - fixed
        left_ms = budget_ms - fixed
        if left_ms < 0:
            return 0
        if left_ms >= each * limit:  # not by division: what a token costs may be next to nothing
            return limit
        return math.floor(left_ms / each)

    def _features(self, tokens: int, context: float) -> tuple[float, float, float, float]:
        tokens_scaled, context_scaled = tokens / self._TOKENS, context / self._CONTEXT
        return 1.0, context_scaled, tokens_scaled, tokens_scaled * context_scaled


class Pacer:
    """Chooses chunk after chunk.

    Args:
        full_chunk: tokens of a chunk when nothing decodes, and never more.
        page_size: chunks are whole pages.
        mixed: a chunk runs in one forward with a decode step, not between two of them.
        target_ms: TPOT that running decodes shall keep; None: MIN_SLOWDOWN of their own.
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
        self._unsettled: tuple[int, float, float] | None = None

    def decoded(self, ms: float) -> None:
        """A decode step without prefill took ``ms``.

        What the first one after a chunk takes longer is the chunk's doing.
        """
        ms = max(ms, 0.01)
        if self.decode_ms is None:
            self.decode_ms = ms
        elif self._unsettled is not None:
            self._settle(max(0.0, ms - self.decode_ms))
        else:
            self._since_probe = 0
            ms = min(ms, _OUTLIER * self.decode_ms)
            self.decode_ms += _DECODE_WEIGHT * (ms - self.decode_ms)

    def chunked(self, tokens: int, context: float, ms: float) -> None:
        """A chunk ran beside decodes in ``ms``, those of their step included if mixed."""
        self._settle(0.0)
        self._largest_tried = max(self._largest_tried, tokens)
        self._since_probe += 1
        if self.decode_ms is not None:
            if self.cost.chunks < _FEW:  # too few to tell an outlier by
                ms = min(ms, _FEW * _OUTLIER * self.decode_ms)
            ms = max(0.0, ms - self.decode_ms) if self.mixed else ms
            self._unsettled = tokens, context, ms

    def _settle(self, later_ms: float) -> None:
        """Take down the last chunk's cost, with what it did to the step after."""
        if self._unsettled is not None:
            tokens, context, ms = self._unsettled
            self._unsettled = None
            self.cost.observe(tokens, context, ms + later_ms)

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
        target_ms = max(self.target_ms or 0.0, MIN_SLOWDOWN * self.decode_ms)
        budget_ms = target_ms - self.decode_ms
        gap_ms = max(
            _LONGEST_GAP * target_ms - self.decode_ms, _MIN_USE * self.cost.fixed_ms(context)
        )
        limit = min(self.full_chunk, max(_FIRST_TOKENS, 2 * self._largest_tried))
        tokens = self._pages(self.cost.max_reply_tokens(gap_ms, context, limit))
        if tokens < rest <= min(_LAST_CHUNK * tokens, limit):
            tokens = self._pages(rest + self.page_size - 1)
        added_ms = self.cost.ms(min(tokens, rest), context)
        steps = max(1, min(_MAX_DECODE_STEPS, math.ceil(added_ms / budget_ms - 0.01)))
        if self.mixed:  # its own step is one of them
            steps -= 1
        if self._since_probe >= _PROBE_EVERY:
            steps = max(2, steps)  # the first is not as decode steps are
        return Chunk(tokens, steps)

    def _pages(self, tokens: int) -> int:
        """Whole pages, at least one, at most a full chunk."""
        least = max(1, min(16, self.full_chunk) // self.page_size)
        return max(least, min(tokens, self.full_chunk) // self.page_size) * self.page_size
