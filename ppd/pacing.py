"""The pacing of append-prefill: chunk sizes with which running decodes keep their TPOT.

This module owns a running estimate of the time that a chunk adds between two decode steps, and
the choice of the next chunk. Durations are passed in; there is neither engine nor clock here.
Sarathi-Serve (OSDI 2024, section 4) observes that a decode step has room for some prefill. How
much is estimated here from the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

# The smallest effective target, in decode steps: it holds without a target, and where decodes
# alone already miss theirs.
MIN_SLOWDOWN = 1.5
# The target holds on average over a chunk and the decode steps after it. The gap of one token may
# be this many targets long.
_MAX_GAP = 1.75
_LAST_CHUNK = 1.5  # the last chunk may be this much longer
# Every chunk has a fixed cost: it reads its context's KV, and the weights of the experts that its
# tokens are routed to. Many small chunks would delay decodes more than few large ones with steps
# between them. So a gap may be longer where a token of the chunk would otherwise cost more than
# this multiple of a token of a full chunk.
_MAX_WASTE = 1.5
_MAX_DECODE_STEPS = 16  # between two chunks: append-prefill must not starve either
_FIRST_TOKENS = 32  # the first chunk beside decodes; later ones at most twice the largest so far
_PROBE_EVERY = 16  # chunks, then two steps of decodes alone to measure their own time
_DECODE_WEIGHT = 0.1  # weight of a new decode step in the moving average
_TRY_EACH = 4  # chunks of each kind before the cheaper kind is chosen
_TRY_OTHER_EVERY = 64  # chunks, then one of the other kind
_FORGET = 0.98  # weight of the earlier chunks in the estimate, at each new chunk
_RIDGE = 1e-3
_FEW = 8  # chunks
_OUTLIER = 4.0  # a longer step counts as this multiple of its expected time


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next chunk.

    Attributes:
        tokens: tokens to prefill.
        decode_steps: decode steps without prefill to run after it.
        mixed: whether it runs in one forward with a decode step.
    """

    tokens: int
    decode_steps: int
    mixed: bool


class ChunkCost:
    """An estimate of the milliseconds that a chunk adds to a decode step.

    The model is ``a + b * context + (c + d * context) * tokens`` with terms of at least 0. It is
    fitted by least squares with exponential forgetting. The terms that grow with context are
    those of attention: the KV that is read once per chunk, and the products of each token.

    Attributes:
        chunks: chunks observed so far.
    """

    _TOKENS, _CONTEXT = 256.0, 4096.0  # scale the terms to about one

    def __init__(self) -> None:
        self._terms = [0.0] * 4
        self._products = [[_RIDGE * (i == j) for j in range(4)] for i in range(4)]
        self._targets = [0.0] * 4
        self.chunks = 0

    def ms(self, tokens: int, context: float) -> float:
        """The estimated cost of a chunk, in milliseconds.

        Args:
            tokens: size of the chunk.
            context: mean number of tokens that each of them attends to.
        """
        return float(sum(map(mul, self._terms, self._features(tokens, context))))

    def observe(self, tokens: int, context: float, ms: float) -> None:
        """Update the estimate by a chunk that took ``ms``."""
        if self.chunks >= _FEW:
            ms = min(ms, _OUTLIER * max(self.ms(tokens, context), 1.0))
        self.chunks += 1
        features = self._features(tokens, context)
        for i, row in enumerate(self._products):
            self._targets[i] = _FORGET * self._targets[i] + features[i] * ms
            for j in range(4):
                row[j] = _FORGET * row[j] + features[i] * features[j]
            row[i] += _RIDGE * (1 - _FORGET)  # the ridge itself is not forgotten
        terms = self._terms
        for _ in range(20):  # coordinate descent: each term at its optimum, or 0
            before = terms.copy()
            for i, row in enumerate(self._products):
                others = sum(map(mul, row, terms)) - row[i] * terms[i]
                terms[i] = max(0.0, (self._targets[i] - others) / row[i])
            if terms == before:
                return

    def fixed_ms(self, context: float) -> float:
        """The cost of the smallest chunk, in milliseconds."""
        return self.ms(0, context)

    def min_tokens(self, full_chunk: int, context: float) -> int:
        """The size of the smallest chunk whose tokens cost little more than a full chunk's."""
        fixed = self.fixed_ms(context)
        each = self.ms(1, context) - fixed
        dearest_ms = _MAX_WASTE * (fixed / full_chunk + each)
        if fixed >= (dearest_ms - each) * full_chunk:  # no division: both may be close to 0
            return full_chunk
        return math.ceil(fixed / (dearest_ms - each))

    def max_tokens(self, budget_ms: float, context: float, limit: int) -> int:
        """The size of the largest chunk within a budget, at most ``limit``; 0 if there is none."""
        fixed = self.fixed_ms(context)
        each = self.ms(1, context) - fixed
        left_ms = budget_ms - fixed
        if left_ms < 0:
            return 0
        if left_ms >= each * limit:  # no division: the cost of a token may be close to 0
            return limit
        return math.floor(left_ms / each)

    def _features(self, tokens: int, context: float) -> tuple[float, float, float, float]:
        tokens_scaled, context_scaled = tokens / self._TOKENS, context / self._CONTEXT
        return 1.0, context_scaled, tokens_scaled, tokens_scaled * context_scaled


class Pacer:
    """Chooses the size of each chunk, and the number of decode steps after it.

    With speculation a decode step gives several tokens, and a mixed chunk gives one. So the cost
    of a chunk is the time that decodes lose by it: a mixed chunk's duration less the time of one
    token, another chunk's whole duration. Then both kinds are measured, and the cheaper is chosen.

    Args:
        full_chunk: tokens of a chunk when nothing decodes; the largest chunk.
        page_size: tokens of a KV page; chunks are whole pages.
        mixed: whether a chunk may run in one forward with a decode step.
        speculative: whether a decode step may give several tokens.
        target_ms: the TPOT to keep for running decodes; None for ``MIN_SLOWDOWN`` times their own.
        fixed_chunk: tokens of every chunk beside decodes; nothing is estimated then.

    Attributes:
        costs: the estimated cost of chunks by whether they are mixed, for the kinds that may be
            chosen.
        tokens_per_step: moving average of a decode step's tokens for one request.
    """

    def __init__(
        self,
        *,
        full_chunk: int,
        page_size: int,
        mixed: bool,
        speculative: bool = False,
        target_ms: float | None = None,
        fixed_chunk: int | None = None,
    ) -> None:
        self.full_chunk = full_chunk
        self.page_size = page_size
        self.mixed = mixed
        self.target_ms = target_ms
        self.fixed_chunk = fixed_chunk
        kinds = (True, False) if mixed and speculative else (mixed,)
        self.costs = {kind: ChunkCost() for kind in kinds}
        self.tokens_per_step = 1.0
        self._step_ms: float | None = None
        self._largest_chunk = 0
        self._since_probe = 0
        self._since_other = 0
        self._unsettled: tuple[ChunkCost, int, float, float] | None = None

    @property
    def decode_ms(self) -> float | None:
        """Moving average of the time of a token without prefill; None before the first."""
        return None if self._step_ms is None else self._step_ms / self.tokens_per_step

    def decoded(self, ms: float, tokens: float = 1.0) -> None:
        """Record that a decode step without prefill took ``ms``.

        The delay of the first decode step after a chunk counts as a cost of the chunk.

        Args:
            ms: duration of the step.
            tokens: mean number of tokens that it gave a request.
        """
        ms = max(ms, 0.01)
        if self._step_ms is None:
            self._step_ms, self.tokens_per_step = ms, tokens
        elif self._unsettled is not None:
            self._settle(max(0.0, ms - self._step_ms))
        else:
            self._since_probe = 0
            ms = min(ms, _OUTLIER * self._step_ms)
            self._step_ms += _DECODE_WEIGHT * (ms - self._step_ms)
            self.tokens_per_step += _DECODE_WEIGHT * (tokens - self.tokens_per_step)

    def chunked(self, tokens: int, context: float, ms: float, *, mixed: bool | None = None) -> None:
        """Record that a chunk beside decodes took ``ms``.

        Args:
            tokens: size of the chunk.
            context: mean number of tokens that each of them attended to.
            ms: duration of the forward; it includes the decode step if the chunk is mixed.
            mixed: whether it was; None if there is one kind. A kind that may not be chosen is
                ignored.
        """
        mixed = self.mixed if mixed is None else mixed
        cost = self.costs.get(mixed)
        if cost is None:
            return
        self._settle(0.0)
        self._largest_chunk = max(self._largest_chunk, tokens)
        self._since_probe += 1
        if self._step_ms is not None and self.decode_ms is not None:
            if cost.chunks < _FEW:  # too few to recognise an outlier
                ms = min(ms, _FEW * _OUTLIER * self._step_ms)
            ms = max(0.0, ms - self.decode_ms) if mixed else ms
            self._unsettled = cost, tokens, context, ms

    def _settle(self, later_ms: float) -> None:
        """Record the cost of the last chunk, with the delay of the step after it."""
        if self._unsettled is not None:
            cost, tokens, context, ms = self._unsettled
            self._unsettled = None
            cost.observe(tokens, context, ms + later_ms)

    def next_chunk(self, rest: int, context: float, behind: int = 0) -> Chunk:
        """Choose the next chunk beside running decodes.

        Args:
            rest: tokens that the next request still needs, at least 1.
            context: tokens of the request before these.
            behind: tokens of the requests behind it, with which the chunk is filled.
        """
        if self.fixed_chunk is not None:
            return Chunk(self._pages(self.fixed_chunk), 0 if self.mixed else 1, self.mixed)
        if self._step_ms is None or self.decode_ms is None:
            return Chunk(self._pages(_FIRST_TOKENS), 0 if self.mixed else 1, self.mixed)
        mixed = self._kind(rest, context)
        cost = self.costs[mixed]
        target_ms = max(self.target_ms or 0.0, MIN_SLOWDOWN * self.decode_ms)
        token_slack_ms = target_ms - self.decode_ms
        step_target_ms = target_ms * self.tokens_per_step
        gap_ms = _MAX_GAP * step_target_ms - self._step_ms
        limit = min(self.full_chunk, max(_FIRST_TOKENS, 2 * self._largest_chunk))
        efficient = min(limit, cost.min_tokens(self.full_chunk, context))
        tokens = self._pages(max(efficient, cost.max_tokens(gap_ms, context, limit)))
        if tokens < rest <= min(_LAST_CHUNK * tokens, limit):
            tokens = self._pages(rest + self.page_size - 1)
        lost_ms = cost.ms(min(tokens, rest + behind), context)
        if mixed:  # its own forward gives a token
            lost_ms -= token_slack_ms
        steps = math.ceil(lost_ms / (token_slack_ms * self.tokens_per_step) - 0.01)
        steps = max(1 - mixed, min(_MAX_DECODE_STEPS - mixed, steps))
        if self._since_probe >= _PROBE_EVERY:
            steps = max(2, steps)  # the first one still includes a delay by the chunk
        return Chunk(tokens, steps, mixed)

    def _kind(self, rest: int, context: float) -> bool:
        """Whether the next chunk is mixed: the cheaper kind, and the other one now and then."""
        if len(self.costs) == 1:
            return self.mixed
        mixed, alone = self.costs[True], self.costs[False]
        if min(mixed.chunks, alone.chunks) < _TRY_EACH:
            return mixed.chunks <= alone.chunks
        tokens = min(rest, max(_FIRST_TOKENS, self._largest_chunk))
        cheaper = mixed.ms(tokens, context) <= alone.ms(tokens, context)
        self._since_other += 1
        if self._since_other >= _TRY_OTHER_EVERY:
            self._since_other = 0
            return not cheaper
        return cheaper

    def _pages(self, tokens: int) -> int:
        """Round down to whole pages, at least one and at most a full chunk."""
        min_pages = max(1, min(16, self.full_chunk) // self.page_size)
        return max(min_pages, min(tokens, self.full_chunk) // self.page_size) * self.page_size
