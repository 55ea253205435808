"""The CPU engine's replacements against plain reference computations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.cpu.kernels import _alloc_decode, _extend_new_rows, _Launch

HEADS, KV_HEADS, DIM = 4, 2, 8


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows, one at a time. Shapes [new, H, D], [context, KV, D]."""
    new, context = query.shape[0], keys.shape[0]
    out = torch.empty_like(query)
    for i in range(new):
        seen = context - new + i + 1
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            weights = torch.softmax(keys[:seen, kv] @ query[i, head] / DIM**0.5, dim=0)
            out[i, head] = weights @ values[:seen, kv]
    return out


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=4))
def test_only_the_new_rows_are_computed_and_rightly(sizes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    slots = 1 + sum(prefix + new for prefix, new in sizes)
    k_cache, v_cache = torch.randn(2, slots, KV_HEADS, DIM)
    order = torch.randperm(slots)
    req_to_token = torch.zeros(len(sizes), 64, dtype=torch.int64)
    used = 0
    for row, (prefix, new) in enumerate(sizes):
        req_to_token[row, : prefix + new] = order[used : used + prefix + new]
        used += prefix + new
    query = torch.randn(sum(new for _, new in sizes), HEADS, DIM)
    output = torch.full_like(query, torch.nan)
    _extend_new_rows(
        None,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        torch.arange(len(sizes)),
        torch.tensor([prefix + new for prefix, new in sizes]),
        torch.tensor([prefix for prefix, _ in sizes]),
        torch.tensor([new for _, new in sizes]),
        enable_gqa=True,
        causal=True,
        scaling=DIM**-0.5,
    )
    start = 0
    for row, (prefix, new) in enumerate(sizes):
        mine = req_to_token[row, : prefix + new]
        wanted = reference(query[start : start + new], k_cache[mine], v_cache[mine])
        torch.testing.assert_close(output[start : start + new], wanted, rtol=1e-4, atol=1e-5)
        start += new


@pytest.mark.parametrize("page_size", [4, 16])
def test_decode_slots_follow_or_open_a_page(page_size: int) -> None:
    # lengths after the step: inside a page, first of a page, inside, first
    seq_lens = torch.tensor([2, page_size + 1, page_size, 2 * page_size + 1])
    last_loc = torch.tensor([100, 203, 302, 407])
    out = torch.empty(4, dtype=torch.int64)
    launch = _Launch(_alloc_decode)
    launch[(4,)](seq_lens, last_loc, torch.tensor([7, 9, 11]), out, 4, page_size)
    assert out.tolist() == [101, 7 * page_size, 303, 9 * page_size]


def test_decode_without_enough_pages_leaves_the_verdict_to_the_caller() -> None:
    out = torch.full((1,), -5)
    _alloc_decode(torch.tensor([5]), torch.tensor([3]), torch.tensor([]), out, 1, 4)
    assert out.tolist() == [-5]
