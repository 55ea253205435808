"""The PPD paper's interference experiment, by the cost model alone.

A batch decodes 64 tokens each; meanwhile prompts of 1,024 tokens are prefilled, with nothing
cached (full) or after the batch's context (append), and then decode beside it. All requests of
the paper's experiment begin with one and the same context, except the full prefills
(freelulul/vllm-ppd, ``scripts/tests/interference_benchmark.py``); vLLM reads a prefix that its
whole batch shares once for all. So there are two readings: each sequence reads a context of its
own; or it is read once, unless a sequence without it is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost_model import CostModel, Extend

_TOKENS = 64  # of every reply
_PREFILL_TOKENS = 1024
_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside ``batch`` sequences of ``context`` tokens."""

    batch: int
    context: int
    prefills: int = 0
    full: bool = False


def slowdown(costs: CostModel, beside: Beside, *, shared: bool) -> float:
    """Return the share by which the batch's TPOT grows."""
    alone = tpot_ms(costs, Beside(beside.batch, beside.context), shared=shared)
    return tpot_ms(costs, beside, shared=shared) / alone - 1


def tpot_ms(costs: CostModel, beside: Beside, *, shared: bool) -> float:
    """Return the batch's TPOT over its 64 tokens; with ``shared`` a common context is read once."""
    left = beside.prefills * _PREFILL_TOKENS
    common = shared and not (beside.full and beside.prefills)
    added = 0 if beside.full else beside.context
    total_ms = 0.0
    joined = 0
    for step in range(_TOKENS):
        now = min(left, _STEP_TOKENS - beside.batch)
        whole, rest = divmod(now, _PREFILL_TOKENS)
        extends = [Extend(_PREFILL_TOKENS, added)] * whole
        if rest:
            extends.append(Extend(rest, added))
        own = beside.batch * step + joined * (_PREFILL_TOKENS + step)
        if common:
            read = beside.context + own
            # Appends read it in the same pass; their products with it remain.
            read -= sum(extend.context for extend in extends)
        else:
            read = beside.batch * beside.context + joined * added + own
        total_ms += costs.step_ms(beside.batch + joined, read, extends)
        left -= now
        joined += len(extends)
    return total_ms / _TOKENS
