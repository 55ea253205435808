"""A Llama in PyTorch whose single steps are measured on a GPU, with a KV pool as engines have.

It has no scheduler, and its KV lies in order. So it takes the time of a step's work on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import gpu_kernels as kernels
from .profile import Step

_EPSILON = 1e-5
_ROPE_BASE = 500_000.0
_GATE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int


class Attention(StrEnum):
    """The library that computes attention.

    Attributes:
        FLASH: FlashAttention 2, as PyTorch has it.
        CUDNN: cuDNN. It has no mask for new tokens after cached ones; these are left to FLASH.
        PLAIN: PyTorch on any device, slow; for tests.
    """

    FLASH = "flash"
    CUDNN = "cudnn"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a layer, each (out, in)."""

    before_attention: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    before_gate: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a Llama."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


def random_weights(of: Dimensions, device: torch.device) -> Weights:
    """Draw weights in bfloat16; norms are ones."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)

    def ones() -> torch.Tensor:
        return torch.ones(of.hidden, dtype=torch.bfloat16, device=device)

    width = of.heads * of.head
    layers = tuple(
        Layer(
            ones(),
            drawn(width + 2 * of.kv_heads * of.head, of.hidden),
            drawn(of.hidden, width),
            ones(),
            drawn(2 * of.inner, of.hidden),
            drawn(of.hidden, of.inner),
        )
        for _ in range(of.layers)
    )
    return Weights(drawn(of.vocabulary, of.hidden), layers, ones(), drawn(of.vocabulary, of.hidden))


class Llama:
    """The model with its KV pool, whose entries are random until a step writes them.

    Args:
        of: its dimensions.
        weights: of these dimensions, on a CUDA device.
        pool_tokens: tokens of KV.
    """

    def __init__(self, of: Dimensions, weights: Weights, pool_tokens: int) -> None:
        self._of, self._weights = of, weights
        self._device = weights.embedding.device
        self._kv = [
            tuple(
                torch.empty(
                    (pool_tokens, of.kv_heads, of.head),
                    dtype=weights.embedding.dtype,
                    device=self._device,
                ).normal_()
                for _ in range(2)
            )
            for _ in range(of.layers)
        ]
        half = of.head // 2
        frequencies = _ROPE_BASE ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(pool_tokens, dtype=torch.float64), frequencies)
        self._cosines = angles.cos().float().to(self._device)
        self._sines = angles.sin().float().to(self._device)

    def prepared(self, step: Step, attention: Attention) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a step that can be recorded as a CUDA graph.

        The pool holds the decoding sequences, which have equally many tokens, then those with new
        tokens. The step takes its token ids, (new tokens + sequences,), in the opposite order: new
        tokens first. It returns logits, one row for each sequence.

        Args:
            step: its shape; ``width`` must be 1.
            attention: the library for all attention that it can compute.
        """
        context = step.context_tokens // max(1, step.sequences)
        begin = step.sequences * context
        places: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        spans: list[tuple[int, int, int]] = []  # new tokens, begin and end in the pool
        for extend in step.extends:
            end = begin + extend.cached_tokens + extend.new_tokens
            places.append(torch.arange(end - extend.new_tokens, end))
            positions.append(torch.arange(extend.new_tokens) + extend.cached_tokens)
            spans.append((extend.new_tokens, begin, end))
            begin = end
        places.append((torch.arange(step.sequences) + 1) * context - 1)
        positions.append(torch.full((step.sequences,), context - 1, dtype=torch.int64))
        slots = torch.cat(places).to(self._device)
        at = torch.cat(positions).to(self._device)
        ends = torch.tensor([new for new, _, _ in spans], dtype=torch.int64).cumsum(0) - 1
        last = torch.cat([ends, step.new_tokens + torch.arange(step.sequences)]).to(self._device)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self._kv[layer]
            parts, offset = [], 0
            for new, start, end in spans:
                part = query[offset : offset + new].unsqueeze(0)
                held = keys[start:end].unsqueeze(0), values[start:end].unsqueeze(0)
                masked = attention is Attention.CUDNN and end - start > new
                way = Attention.FLASH if masked else attention
                parts.append(_attention(part, *held, True, way).flatten(0, 1))
                offset += new
            if step.sequences:
                shape = (step.sequences, context, *keys.shape[1:])
                held = (
                    keys[: step.sequences * context].view(shape),
                    values[: step.sequences * context].view(shape),
                )
                part = query[offset:].unsqueeze(1)
                parts.append(_attention(part, *held, False, attention).flatten(0, 1))
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

        def run(ids: torch.Tensor) -> torch.Tensor:
            of, weights = self._of, self._weights
            residual = torch.zeros(
                (ids.shape[0], of.hidden), dtype=weights.embedding.dtype, device=self._device
            )
            update = functional.embedding(ids, weights.embedding)
            for number, layer in enumerate(weights.layers):
                qkv = functional.linear(
                    self._normed(residual, update, layer.before_attention), layer.qkv
                ).view(ids.shape[0], -1, of.head)
                kernels.rotate_and_store[(ids.shape[0],)](
                    qkv,
                    at,
                    slots,
                    self._cosines,
                    self._sines,
                    *self._kv[number],
                    HEADS=of.heads,
                    KV_HEADS=of.kv_heads,
                    HALF=of.head // 2,
                    ROWS=triton.next_power_of_2(of.heads + 2 * of.kv_heads),
                )
                update = functional.linear(attend(number, qkv[:, : of.heads]), layer.output)
                both = functional.linear(
                    self._normed(residual, update, layer.before_gate), layer.gate_up
                )
                update = functional.linear(self._gated(both), layer.down)
            normed = self._normed(residual, update, weights.norm)
            return functional.linear(normed[last], weights.head)

        return run

    def _normed(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(residual)
        width = residual.shape[1]
        kernels.add_norm[(residual.shape[0],)](
            residual,
            update,
            weight,
            out,
            _EPSILON,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
        return out

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        tokens, width = both.shape[0], both.shape[1] // 2
        out = torch.empty((tokens, width), dtype=both.dtype, device=both.device)
        kernels.gate[(tokens, triton.cdiv(width, _GATE_BLOCK))](
            both, out, WIDTH=width, BLOCK=_GATE_BLOCK
        )
        return out


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, way: Attention
) -> torch.Tensor:
    """Attention of (n, new, heads, size) over (n, tokens, kv_heads, size); the last tokens are new.

    Returns:
        (n, new, heads, size).
    """
    if way is Attention.FLASH:
        # The operator below scaled_dot_product_attention: its causal mask ends at the last token.
        found: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query, keys, values, None, None, query.shape[1], keys.shape[1], 0.0, causal, False
        )[0]
        return found
    mask = None
    if way is Attention.PLAIN:
        shape = query.shape[1], keys.shape[1]
        mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        mask, causal = mask.tril(shape[1] - shape[0]), False
    backend = SDPBackend.CUDNN_ATTENTION if way is Attention.CUDNN else SDPBackend.MATH
    with sdpa_kernel([backend]):
        return functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=True,
        ).transpose(1, 2)
