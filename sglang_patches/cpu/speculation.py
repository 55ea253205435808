"""Speculative decoding with EAGLE on a CPU without AMX: its kernels, and a draft attention backend.

SGLang 0.5.23 calls these kernels in ``sgl_kernel``, which has no build for such a machine. The
functions here have the same parameters, and run as tensor operations. A draft is a chain
(``--speculative-eagle-topk 1``); trees are refused.

``torch_native`` attention has no backend for the steps of a draft, and computes no attention of a
verify step (``ForwardMode.TARGET_VERIFY`` has no extend lengths). Both are added here.

A draft of DeepSeek's synchronizes a GPU on any device when it takes the target's embeddings
(deepseek_v2.py:3448).

Upstream verifies greedily on a CPU, whatever the sampling parameters. Here a batch that samples
takes the branch of GPUs, ``tree_speculative_sampling_target_only``. A greedy request in it has the
top k of 1.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_QLEN_ONLY = 1  # TreeMaskMode of eagle_utils.py: the mask covers the draft tokens alone


def install() -> None:
    """Patch the attention backend and the draft worker in this process.

    Raises:
        AttributeError: SGLang has moved one of the names.
    """
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    for owner, name in (
        (TorchNativeAttnBackend, "init_forward_metadata"),
        (DraftBackendFactory, "_create_triton_decode_backend"),
        (DraftBackendFactory, "_create_backend"),
        (eagle_utils, "_verify_uses_greedy"),
        (eagle_utils, "tree_speculative_sampling_target_only"),
        (eagle_utils, "top_k_renorm_prob"),
        (eagle_utils, "top_p_renorm_prob"),
    ):
        getattr(owner, name)
    setattr(torch.cuda, "synchronize", lambda *_: None)  # noqa: B010 (mypy: a function)
    _patch_verify_lengths(TorchNativeAttnBackend)
    _patch_draft_backends(DraftBackendFactory)
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = sample_chain
    eagle_utils.top_k_renorm_prob = keep_top_k
    eagle_utils.top_p_renorm_prob = keep_top_p


def _patch_verify_lengths(backend: Any) -> None:
    import torch

    init_forward_metadata = backend.init_forward_metadata

    def init(self: Any, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_target_verify():
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(
                forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
            )
        init_forward_metadata(self, forward_batch)

    backend.init_forward_metadata = init


def _patch_draft_backends(factory: Any) -> None:
    """Add ``torch_native`` to the backends of a draft's decode steps and extends."""
    create = factory._create_backend

    def create_backend(
        self: Any, name: str, backends: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        is_decode = backends.get("triton") == self._create_triton_decode_backend
        ours = _draft_steps if is_decode else _draft_extend
        backends = backends | {"torch_native": lambda: ("torch_native", ours(self))}
        return create(self, name, backends, *args, **kwargs)

    factory._create_backend = create_backend


def _draft_extend(factory: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


def _draft_steps(factory: Any) -> Any:
    if factory.topk != 1:
        raise ValueError("on a CPU without AMX a draft is a chain: --speculative-eagle-topk 1")
    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)


class DraftSteps:
    """The attention backends of a chain draft, one for each step but the last."""

    def __init__(self, runner: Any, steps: int) -> None:
        self.attn_backends = [_step_backend(runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare all steps of a draft."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _step_backend(runner: Any, step: int) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class StepBackend(TorchNativeAttnBackend):  # type: ignore[misc]
        """Attention over the committed tokens and the draft tokens up to this step."""

        def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Any:
            *before, seq_lens = args[:7]  # query, output, keys, values, two of slots, lengths
            return super()._run_sdpa_forward_decode(
                *before, seq_lens + step + 1, *args[7:], **kwargs
            )

    return StepBackend(runner)


# -- kernels: names and parameters are those of sgl_kernel ------------------------------------


def build_tree_kernel_efficient_cpu(
    _parents: torch.Tensor,
    _scores: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    _steps: int,
    tokens: int,
    mask_mode: int,
) -> None:
    """Describe the draft of each row as a chain of ``tokens`` tokens behind its sequence.

    Shapes: seq_lens [rows]; tree_mask [rows * tokens * tokens]; positions [rows * tokens]; the
    other outputs [rows, tokens].

    Raises:
        NotImplementedError: the draft is a tree.
    """
    import torch

    if topk != 1 or int(mask_mode) != _QLEN_ONLY:
        raise NotImplementedError("a tree of drafts has no CPU kernel here; use topk 1")
    rows, chain = seq_lens.numel(), torch.arange(tokens)
    positions.view(rows, tokens).copy_(seq_lens[:, None] + chain)
    retrieve_index.copy_(torch.arange(rows)[:, None] * tokens + chain)
    next_token[:, :-1] = chain[1:]
    next_token[:, -1] = -1
    next_sibling.fill_(-1)
    tree_mask.view(rows, tokens, tokens).copy_(torch.ones(tokens, tokens, dtype=torch.bool).tril())


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the longest chain of draft tokens that equal the target's own choices.

    Shapes: predicts [rows * tokens]; accept_index [rows, steps + 1], global indices, -1 behind the
    last; accept_token_num [rows], without the bonus token; the others [rows, tokens].
    """
    for row in range(candidates.shape[0]):
        node, accepted = 0, 0
        accept_index[row, 0] = retrive_index[row, 0]
        while accepted + 1 < accept_index.shape[1]:
            choice = target_predict[row, node]
            predicts[retrive_index[row, node]] = choice
            child = int(retrive_next_token[row, node])
            while child >= 0 and candidates[row, child] != choice:
                child = int(retrive_next_sibling[row, child])
            if child < 0:
                break
            node, accepted = child, accepted + 1
            accept_index[row, accepted] = retrive_index[row, node]
        accept_token_num[row] = accepted
        predicts[retrive_index[row, node]] = target_predict[row, node]


def sample_chain(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    **_unused: Any,
) -> None:
    """Accept draft tokens so that the result is distributed as the target alone samples.

    A draft token is accepted with its probability under the target. After a rejection, the token
    is drawn from the target's distribution without it. Shapes as for ``verify_tree_greedy_cpu``;
    target_probs [rows, tokens, vocabulary]; uniform_samples [rows, tokens], the final ones [rows].
    """
    for row in range(candidates.shape[0]):
        accepted, weights = 0, target_probs[row, 0]
        accept_index[row, 0] = retrive_index[row, 0]
        while accepted + 1 < accept_index.shape[1]:
            token = int(candidates[row, accepted + 1])
            if float(uniform_samples[row, accepted]) >= float(weights[token]):
                weights = weights.clone()
                weights[token] = 0.0
                break
            predicts[retrive_index[row, accepted]] = token
            accepted += 1
            accept_index[row, accepted] = retrive_index[row, accepted]
            weights = target_probs[row, accepted]
        accept_token_num[row] = accepted
        cumulative = weights.double().cumsum(0)
        drawn = float(uniform_samples_for_final_sampling[row]) * float(cumulative[-1])
        predicts[retrive_index[row, accepted]] = int((cumulative <= drawn).sum())


def keep_top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Return the distributions [rows, vocabulary] of each row's most probable ``top_ks`` tokens."""
    import torch

    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ordered[torch.arange(probs.shape[-1]) >= top_ks[:, None]] = 0.0
    return _normalised(ordered, tokens)


def keep_top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return the distributions [rows, vocabulary] of the fewest tokens with ``top_ps`` in sum."""
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ordered[ordered.cumsum(-1) - ordered >= top_ps[:, None]] = 0.0
    return _normalised(ordered, tokens)


def _normalised(ordered: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    kept = ordered / ordered.sum(dim=-1, keepdim=True)
    return kept.new_zeros(kept.shape).scatter_(-1, tokens, kept)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _pool_len: int,
) -> None:
    """Write each request's new slots, which stand one after another, into its row of the table."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[begin : begin + end - start]
        begin += end - start


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _pool_len: int,
) -> None:
    """Collect each request's slots from ``starts`` to ``ends``, one after another."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[begin : begin + end - start] = req_to_token[row, start:end]
        begin += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    pool_len: int,
    topk: int,
    columns: int,
) -> None:
    """Collect each request's ``topk * columns`` slots behind its sequence."""
    ends = seq_lens + topk * columns
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, ends, slots, pool_len)


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """Write each request's last accepted token; ``tokens`` holds ``stride`` of each request."""
    import torch

    last = torch.arange(lengths.numel()) * stride + lengths - 1
    bonus.copy_(tokens.reshape(-1)[last])


def copy_all_layer_kv_cache_cpu(
    buffers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy KV slots in the buffers of all layers; targets and sources may overlap.

    The pool of a draft calls it at its start. Trees of drafts would move KV with it.

    Shapes: buffers [buffers], addresses; strides [buffers], bytes of a slot; targets and sources
    [slots].
    """
    for address, stride in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in sources.tolist()]
        for slot, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        build_tree_kernel_efficient_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_bonus_tokens_cpu,
        verify_tree_greedy_cpu,
    )
}
