"""The CPU engine's kernels of speculative decoding against plain reference computations."""

from __future__ import annotations

import random
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.cpu.speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
    keep_top_k,
    keep_top_p,
    sample_chain,
    verify_tree_greedy_cpu,
)


def chain(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices, next tokens and next siblings of chains."""
    index, after, sibling = (torch.full((rows, tokens), 7) for _ in range(3))
    seq_lens = torch.arange(10, 10 + rows)
    mask = torch.zeros(rows * tokens * tokens, dtype=torch.bool)
    positions = torch.zeros(rows * tokens, dtype=torch.int64)
    unused = torch.zeros(0)
    build_tree_kernel_efficient_cpu(
        unused, unused, seq_lens, mask, positions, index, after, sibling, 1, tokens - 1, tokens, 1
    )
    assert positions.view(rows, tokens).tolist() == [
        [10 + row + i for i in range(tokens)] for row in range(rows)
    ]
    assert mask.view(rows, tokens, tokens)[-1].equal(torch.ones(tokens, tokens).tril().bool())
    return index, after, sibling


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(2, 6), st.randoms(use_true_random=False))
def test_drafts_are_accepted_up_to_the_first_that_differs(
    rows: int, tokens: int, source: random.Random
) -> None:
    index, after, sibling = chain(rows, tokens)
    target = torch.tensor([[source.randint(0, 2) for _ in range(tokens)] for _ in range(rows)])
    drafted = torch.tensor([[source.randint(0, 2) for _ in range(tokens)] for _ in range(rows)])
    predicts = torch.zeros(rows * tokens, dtype=torch.int32)
    accept_index = torch.full((rows, tokens), -1, dtype=torch.int32)
    accepted = torch.zeros(rows, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=drafted,
        retrive_index=index,
        retrive_next_token=after,
        retrive_next_sibling=sibling,
        target_predict=target,
    )
    bonus = torch.zeros(rows, dtype=torch.int32)
    fill_bonus_tokens_cpu(predicts[accept_index], accepted + 1, bonus, tokens)
    for row in range(rows):
        same = 0
        while same + 1 < tokens and drafted[row, same + 1] == target[row, same]:
            same += 1
        assert accepted[row] == same
        kept = predicts.view(rows, tokens)[row, : same + 1]
        assert kept.tolist() == target[row, : same + 1].tolist()
        assert bonus[row] == target[row, same]


def test_a_sampled_chain_has_the_targets_distribution() -> None:
    """Whatever is drafted: the first token is distributed as the target's first row."""
    torch.manual_seed(0)
    target = torch.tensor([0.5, 0.3, 0.15, 0.05])
    probs = torch.stack([target, torch.tensor([0.1, 0.2, 0.3, 0.4])])[None]
    index = torch.arange(2)[None]
    count = 20_000
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for _ in range(count):
        predicts = torch.zeros(2, dtype=torch.int32)
        accepted = torch.zeros(1, dtype=torch.int32)
        sample_chain(
            predicts=predicts,
            accept_index=torch.full((1, 2), -1, dtype=torch.int32),
            accept_token_num=accepted,
            candidates=torch.tensor([[9, 1]]),  # the draft always proposes token 1
            retrive_index=index,
            uniform_samples=torch.rand(1, 2),
            uniform_samples_for_final_sampling=torch.rand(1),
            target_probs=probs,
        )
        firsts[int(predicts[0])] += 1
        if int(accepted[0]):
            seconds[int(predicts[1])] += 1
    for token, probability in enumerate(target.tolist()):
        assert abs(firsts[token] / count - probability) < 0.015
    for token, probability in enumerate([0.1, 0.2, 0.3, 0.4]):
        assert abs(seconds[token] / seconds.total() - probability) < 0.03


def test_the_most_probable_tokens_are_kept() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.2, 0.3]])
    by_number = keep_top_k(probs, torch.tensor([2, 1, 1 << 30]))
    expected = torch.tensor([[0, 4 / 7, 0, 3 / 7], [1, 0, 0, 0], [0.1, 0.4, 0.2, 0.3]])
    assert torch.allclose(by_number, expected)
    by_sum = keep_top_p(probs, torch.tensor([0.6, 0.5, 1.0]))
    assert torch.allclose(by_sum[0], expected[0])
    assert torch.allclose(by_sum[1], torch.tensor([0.5, 0.5, 0.0, 0.0]))
    assert torch.allclose(by_sum[2], probs[2])


def test_slots_are_written_and_read_by_rows() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows = torch.tensor([2, 0])
    slots = torch.tensor([11, 12, 13, 14, 15])
    assign_req_to_token_pool_cpu(
        rows, table, torch.tensor([1, 3]), torch.tensor([4, 5]), slots, table.shape[1]
    )
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 14, 15, 0, 0, 0]
    out = torch.zeros(4, dtype=torch.int64)
    assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor([2, 3]), out, 8, 1, 2)
    assert out.tolist() == [12, 13, 14, 15]


def test_kv_slots_are_copied_in_all_layers_at_once() -> None:
    layers = [torch.arange(24.0).reshape(6, 4), torch.arange(12.0).reshape(6, 2) + 100]
    before = [layer.clone() for layer in layers]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([layer.stride(0) * layer.element_size() for layer in layers])
    targets, sources = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 5])  # they overlap
    copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources)
    for layer, earlier in zip(layers, before, strict=True):
        assert layer[targets].equal(earlier[sources])
        assert layer[[0, 4, 5]].equal(earlier[[0, 4, 5]])
