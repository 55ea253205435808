"""What a forward step takes, from the model's sizes and the GPU's: a roofline with few parameters.

A step has three parts. Products with the weights take as long as computing or reading the weights,
whichever is longer: so a decode step costs the same for one sequence as for a hundred, until it
saturates. Attention of new tokens takes O(m(n+m)) products for ``m`` tokens after ``n`` cached ones
(PPD paper, section 3). Reading the KV of every context takes its bytes. Besides, each step and each
sequence in it has a fixed price. There are no queues in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a dense decoder, from its config.

    Attributes:
        layer_parameters: those that every token meets (embeddings and head left out).
    """

    name: str
    parameters: float
    layer_parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        """The size of its weights."""
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """The size of one token's KV."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def flops_per_token(self) -> float:
        """The floating-point operations for one token, without attention."""
        return 2.0 * self.layer_parameters

    @property
    def flops_per_pair(self) -> float:
        """The operations for a new token and one token that it attends to: scores and values."""
        return 4.0 * self.layers * self.hidden


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU, from its data sheet."""

    name: str
    peak_flops: float
    memory_bytes_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The parameters of serving that no data sheet lists.

    ``docs/SIMULATOR.md`` names the measurement behind each value.
    """

    compute_share: float
    attention_share: float
    memory_share: float
    step_ms: float
    sequence_ms: float
    request_ms: float
    handover_ms: float
    link_bytes_per_s: float
    memory_used_share: float
    activation_bytes: float


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens computed in a step for one sequence, after ``context`` cached ones."""

    tokens: int
    context: int

    @property
    def pairs(self) -> float:
        """The token pairs of its attention, each token with the context and the tokens before."""
        return self.tokens * (self.context + (self.tokens + 1) / 2)


class Costs(Protocol):
    """What steps and transfers take, as a simulated worker needs it.

    Attributes:
        overlap: a step is launched while the one before it runs. So a prefill that comes beside
            decodes starts a step later. A request whose KV has arrived gives its first token at
            once, because the prefill worker has computed it. A prefill for a remote turn begins
            when the decode worker's step ends.
        transfer_ms: for each token of KV.
        request_ms: of each request, once.
        handover_ms: of each remote turn, beside its transfer.
    """

    overlap: bool
    transfer_ms: float

    @property
    def request_ms(self) -> float: ...

    @property
    def handover_ms(self) -> float: ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    def step_ms(self, sequences: int, context_tokens: int, extends: list[Extend]) -> float:
        """Return the milliseconds of one forward."""

    def decode_ms(self, steps: int, sequences: int, context_tokens: int) -> float:
        """Return the milliseconds of ``steps`` decode steps."""

    def decode_steps(self, ms: float, sequences: int, context_tokens: int) -> int:
        """Return the least number of decode steps that take ``ms`` or longer; at least one."""


class CostModel:
    """What forwards and transfers take, for one dense model on one GPU; one of the ``Costs``."""

    def __init__(self, model: ModelSizes, gpu: Gpu, serving: Serving) -> None:
        self.overlap = False  # not in the vLLM of the paper's machine
        self.model = model
        self.gpu = gpu
        self.serving = serving
        flops_per_ms = gpu.peak_flops / 1e3
        bytes_per_ms = gpu.memory_bytes_per_s * serving.memory_share / 1e3
        self.token_ms = model.flops_per_token / (flops_per_ms * serving.compute_share)
        self.pair_ms = model.flops_per_pair / (flops_per_ms * serving.attention_share)
        self.weights_ms = model.weight_bytes / bytes_per_ms
        self.context_ms = model.kv_bytes_per_token / bytes_per_ms  # for each token of KV read
        self.transfer_ms = model.kv_bytes_per_token / (serving.link_bytes_per_s / 1e3)

    @property
    def request_ms(self) -> float:
        """What a request takes once."""
        return self.serving.request_ms

    @property
    def handover_ms(self) -> float:
        """What a remote turn takes beside its transfer."""
        return self.serving.handover_ms

    @property
    def kv_capacity_tokens(self) -> int:
        """The tokens of KV that fit beside the weights."""
        left = (
            self.gpu.memory_bytes * self.serving.memory_used_share
            - self.model.weight_bytes
            - self.serving.activation_bytes
        )
        return int(left / self.model.kv_bytes_per_token)

    def step_ms(self, sequences: int, context_tokens: int, extends: list[Extend]) -> float:
        """Return the milliseconds of one forward.

        Args:
            sequences: that decode.
            context_tokens: that these hold together.
            extends: prefills in the same forward.
        """
        new = sequences + sum(extend.tokens for extend in extends)
        pairs = sum(extend.pairs for extend in extends)
        read = context_tokens + sum(extend.context for extend in extends)
        return (
            self.serving.step_ms
            + self.serving.sequence_ms * sequences
            + max(new * self.token_ms + pairs * self.pair_ms, self.weights_ms)
            + read * self.context_ms
        )

    def decode_ms(self, steps: int, sequences: int, context_tokens: int) -> float:
        """Return the milliseconds of ``steps`` decode steps; each adds a token to every context."""
        read = steps * context_tokens + sequences * steps * (steps - 1) / 2
        return steps * self._flat_ms(sequences) + read * self.context_ms

    def decode_steps(self, ms: float, sequences: int, context_tokens: int) -> int:
        """The least number of decode steps that take ``ms`` or longer; at least one."""
        growth = sequences * self.context_ms / 2
        first = self._flat_ms(sequences) + context_tokens * self.context_ms - growth
        if growth > 0:
            steps = (math.sqrt(first * first + 4 * growth * max(0.0, ms)) - first) / (2 * growth)
        else:
            steps = ms / first
        return max(1, math.ceil(steps - 1e-6))

    def _flat_ms(self, sequences: int) -> float:
        """Of a decode step, without what it reads."""
        return (
            self.serving.step_ms
            + self.serving.sequence_ms * sequences
            + max(sequences * self.token_ms, self.weights_ms)
        )

    def local_ttft_ms(self, new_tokens: int, context_tokens: int) -> float:
        """Return the TTFT of a local turn on an idle worker."""
        return self.serving.request_ms + self.step_ms(0, 0, [Extend(new_tokens, context_tokens)])

    def remote_ttft_ms(self, new_tokens: int, cached_tokens: int, moved_tokens: int) -> float:
        """Return the TTFT of a remote turn in an idle cluster.

        It is the prefill of ``new_tokens`` after ``cached_tokens``, then the transfer of
        ``moved_tokens``, then the decode worker's first step.
        """
        return (
            self.local_ttft_ms(new_tokens, cached_tokens)
            + moved_tokens * self.transfer_ms
            + self.serving.handover_ms
            + self.step_ms(1, new_tokens + cached_tokens, [])
        )


LLAMA_8B = ModelSizes(
    name="Llama-3.1-8B",
    parameters=8.03e9,
    layer_parameters=6.98e9,
    layers=32,
    hidden=4096,
    kv_heads=8,
    head_dim=128,
)
H100 = Gpu(name="H100 SXM", peak_flops=989e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9)

# What ``ppd-eval simulate calibrate`` gives (docs/SIMULATOR.md). Assumed: attention's share (the
# paper's contexts are too short to show it), and the last; the one before is the paper's flag.
VLLM_H100 = Serving(
    compute_share=0.525,
    attention_share=0.525,
    memory_share=0.988,
    step_ms=2.90,
    sequence_ms=0.0754,
    request_ms=20.35,
    handover_ms=63.3,
    link_bytes_per_s=19.0e9,
    memory_used_share=0.85,
    activation_bytes=4e9,
)


def paper_model() -> CostModel:
    """Return the cost model of the paper's machine: 4 x H100, Llama-3.1-8B, vLLM."""
    return CostModel(LLAMA_8B, H100, VLLM_H100)
