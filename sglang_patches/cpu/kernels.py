"""Replacements for functions of SGLang that cannot compute well on a CPU.

* ``torch_native`` attention pads the query to the whole context before an
  extend (torch_native_backend.py:128), so an append-prefill costs as much as a
  full prefill. Here only the new rows are computed.
* The paged allocator launches Triton kernels (mem_cache/allocator/paged.py:206
  and :247). Here they run as tensor operations: upstream's own
  ``alloc_extend_naive``, and its decode twin.
* ``torch_native`` has no entry in the table that chooses between the two forms
  of multi-head latent attention (MLA). The entry of Triton is used in its place
  (attention_backend_handler.py:53). It takes the form with expanded heads for an
  extend without prefix, which then reads latents as keys and values. Here MLA
  always takes the latent form, which ``torch_native`` computes rightly.

* With DP attention ``torch_native`` has no length for the rows that pad a batch,
  and logits are exchanged by an operator of GPUs (parallel_state.py:244).

The module holds numerics only. Disaggregation has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Patch the modules in this process.

    Raises:
        AttributeError: SGLang has moved one of the names.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    for owner, name in (
        (TorchNativeAttnBackend, "_run_sdpa_forward_extend"),
        (TorchNativeAttnBackend, "_make_sliding_window_mask"),
        (paged, "alloc_extend_kernel"),
        (paged, "alloc_decode_kernel"),
        (paged, "alloc_extend_naive"),
        (GroupCoordinator, "_all_to_all_single"),
    ):
        getattr(owner, name)
    TorchNativeAttnBackend._run_sdpa_forward_extend = _extend_new_rows
    paged.alloc_extend_kernel = _Launch(_alloc_extend)
    paged.alloc_decode_kernel = _Launch(_alloc_decode)
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    GroupCoordinator.all_to_all_single = GroupCoordinator._all_to_all_single


def _extend_new_rows(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Compute the attention of each sequence's new rows over its whole context.

    Shapes: query and output [new_tokens, heads, head_dim]; k_cache and v_cache
    [slots, kv_heads, head_dim]; req_to_token [rows, max_context]; the per-sequence
    tensors [sequences]. Cost O(new * context) instead of O(context ** 2).
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    start = 0
    for i in range(seq_lens.shape[0]):
        new = int(extend_seq_lens[i])
        context = int(extend_prefix_lens[i]) + new  # seq_lens of a verify step leaves its own out
        first_slot = 0
        if encoder_lens is not None:
            if is_cross_attn:
                context = int(encoder_lens[i])
            else:
                first_slot = int(encoder_lens[i])
        slots = req_to_token[req_pool_indices[i], first_slot : first_slot + context]
        rows = query[start : start + new].movedim(0, 1).unsqueeze(0)
        keys = k_cache[slots].movedim(0, 1).unsqueeze(0).to(rows.dtype)
        values = v_cache[slots].movedim(0, 1).unsqueeze(0).to(rows.dtype)
        mask: Any = None
        if sliding_window_size is not None and sliding_window_size > -1:
            mask = self._make_sliding_window_mask(
                q_len=new,
                kv_len=context,
                sliding_window_size=sliding_window_size,
                device=rows.device,
                query_offset=context - new,
            )
        elif causal and 1 < new < context:
            mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
        attended = scaled_dot_product_attention(
            rows,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and new == context and mask is None,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[start : start + new] = attended.squeeze(0).movedim(1, 0)
        start += new
    return output


class _Launch:
    """Takes calls ``kernel[grid](...)`` as a Triton kernel does, and runs a function instead."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._function


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_size_upper: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    pages = (seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size
    if int(pages.sum()) > free_pages.numel():
        return  # the caller compares the same two numbers next and stops there
    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device
    )


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_size_upper: int,
    page_size: int,
) -> None:
    opens_page = (seq_lens - 1) % page_size == 0
    if int(opens_page.sum()) > free_pages.numel():
        return  # as above
    out_indices.copy_(last_loc + 1)
    out_indices[opens_page] = free_pages[: int(opens_page.sum())] * page_size
