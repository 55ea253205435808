"""The PPD paper's interference experiment, by the cost model alone.

A batch decodes 64 tokens each; meanwhile prompts of 1,024 tokens are prefilled, with nothing
cached (full) or after the batch's context (append), and then decode beside it. All requests of
the paper's experiment begin with one and the same context, except the full prefills
(freelulul/vllm-ppd, ``scripts/tests/interference_benchmark.py``); vLLM reads a prefix that its
whole batch shares once for all. So there are two readings: each sequence reads a context of its
own; or it is read once, unless a sequence without it is in the batch.

The authors' repository has the results of an earlier run with other lengths
(``ppd/results/interference`` of commit d6d4efb). Those are measured; of the paper's figures only
some values are printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .cost_model import CostModel, Extend

_TOKENS = 64  # of every reply
_PREFILL_TOKENS = 1024
_STEP_TOKENS = 8192
_CONTEXT = 2048
BATCHES = (10, 50, 100, 150, 200, 250)  # Figures 2 and 7
CONTEXTS = (2048, 8192, 16384, 32768, 65536, 102400)  # Figure 8, beside a batch of 64
_EARLIER_APPEND = 128
# The earlier run: TPOT in ms, the mean of five repetitions. By batch: alone; beside 1 append,
# 1 full prefill, 4 appends, 4 full prefills.
EARLIER_RUN = {
    10: (11.1, 11.9, 11.3, 12.0, 13.0),
    50: (16.0, 15.7, 25.2, 16.4, 31.9),
    100: (22.8, 23.1, 45.2, 25.2, 51.9),
    150: (30.3, 29.8, 64.9, 31.7, 71.7),
    200: (38.4, 41.8, 83.1, 42.5, 94.8),
    250: (47.7, 52.1, 96.1, 49.4, 108.0),
}


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside ``batch`` sequences of ``context`` tokens.

    Attributes:
        tokens: of each prefill.
    """

    batch: int
    context: int
    prefills: int = 0
    full: bool = False
    tokens: int = _PREFILL_TOKENS


@dataclass(frozen=True, slots=True)
class Curve:
    """One point of the paper's figures of interference, simulated, and measured by its authors.

    Attributes:
        figure: its number, or ``earlier run``.
        shared: the batch reads its context once.
        slowdown: the share by which TPOT grows.
        measured: the same, of the earlier run; None: there is no number.
    """

    figure: str
    batch: int
    context: int
    prefills: int
    full: bool
    tokens: int
    shared: bool
    alone_ms: float
    tpot_ms: float
    slowdown: float
    measured: float | None = None


def curves(costs: CostModel) -> Iterator[Curve]:
    """Yield all points of Figures 2, 7 and 8, and of the earlier run."""
    for shared, full in product((False, True), (False, True)):
        for prefills, figure in ((1, "2"), (4, "7")):
            for batch in BATCHES:
                beside = Beside(batch, _CONTEXT, prefills, full)
                yield _curve(costs, figure, beside, shared=shared)
                tokens = _PREFILL_TOKENS if full else _EARLIER_APPEND
                earlier = Beside(batch, _CONTEXT, prefills, full, tokens)
                alone, one, one_full, four, four_full = EARLIER_RUN[batch]
                found = {(1, False): one, (1, True): one_full}
                found |= {(4, False): four, (4, True): four_full}
                measured = found[prefills, full] / alone - 1
                yield _curve(costs, "earlier run", earlier, shared=shared, measured=measured)
        for context in CONTEXTS:
            yield _curve(costs, "8", Beside(64, context, 1, full), shared=shared)


def _curve(
    costs: CostModel, figure: str, beside: Beside, *, shared: bool, measured: float | None = None
) -> Curve:
    alone_ms = tpot_ms(costs, Beside(beside.batch, beside.context), shared=shared)
    ms = tpot_ms(costs, beside, shared=shared)
    return Curve(
        figure=figure,
        batch=beside.batch,
        context=beside.context,
        prefills=beside.prefills,
        full=beside.full,
        tokens=beside.tokens,
        shared=shared,
        alone_ms=round(alone_ms, 3),
        tpot_ms=round(ms, 3),
        slowdown=round(ms / alone_ms - 1, 4),
        measured=None if measured is None else round(measured, 4),
    )


def slowdown(costs: CostModel, beside: Beside, *, shared: bool) -> float:
    """Return the share by which the batch's TPOT grows."""
    alone = tpot_ms(costs, Beside(beside.batch, beside.context), shared=shared)
    return tpot_ms(costs, beside, shared=shared) / alone - 1


def tpot_ms(costs: CostModel, beside: Beside, *, shared: bool) -> float:
    """Return the batch's TPOT over its 64 tokens; with ``shared`` a common context is read once."""
    size = beside.tokens
    left = beside.prefills * size
    common = shared and not (beside.full and beside.prefills)
    added = 0 if beside.full else beside.context
    total_ms = 0.0
    joined = 0
    for step in range(_TOKENS):
        now = min(left, _STEP_TOKENS - beside.batch)
        whole, rest = divmod(now, size)
        extends = [Extend(size, added)] * whole
        if rest:
            extends.append(Extend(rest, added))
        own = beside.batch * step + joined * (size + step)
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
