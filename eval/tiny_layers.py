"""The architectures of small models: fields of their configuration, and weights of one layer.

The two dense families differ in the normalisation of queries and keys. ``QWEN3_MOE`` routes each
token to two of eight experts. ``DEEPSEEK_V3`` has multi-head latent attention (MLA) and shared
experts. Its rank of the latent is not the head size, or an engine that took latents for keys
would go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, assert_never

if TYPE_CHECKING:
    import torch

_EXPERTS, _EXPERTS_OF_A_TOKEN = 8, 2
_Q_LORA, _KV_LORA, _QK_NOPE, _QK_ROPE, _V_HEAD = 64, 48, 32, 16, 24  # DeepSeek-V3's ranks and sizes


class Family(StrEnum):
    """An architecture, by its ``model_type`` in transformers."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V3 = "deepseek_v3"


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions that all families have."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    max_context_tokens: int

    @property
    def intermediate(self) -> int:
        """The width of a dense feed-forward layer."""
        return self.hidden * 3

    @property
    def dense_layers(self) -> int:
        """How many layers of DeepSeek-V3 have no experts: the first one, if others follow."""
        return min(1, self.layers - 1)

    @property
    def expert(self) -> int:
        """The width of one expert."""
        return self.hidden // 2


class Projections:
    """Makes random weights of about unit gain, always the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, gain: float = 1.6) -> torch.Tensor:
        """A matrix of shape [rows, columns].

        The usual deviation of 0.02 leaves logits so flat that greedy output repeats one token.
        Layers of about unit gain make it depend on everything that came before.
        """
        import torch

        return torch.randn(rows, columns, generator=self._generator) * (gain / columns**0.5)


def family_config(family: Family, shape: Shape) -> dict[str, Any]:
    """The fields of ``config.json`` that depend on the family."""
    head_dim = shape.hidden // shape.heads
    grouped = {"num_key_value_heads": shape.kv_heads, "head_dim": head_dim}
    dense = {"intermediate_size": shape.intermediate}
    match family:
        case Family.LLAMA:
            return _architecture("LlamaForCausalLM", family) | grouped | dense
        case Family.QWEN3:
            return _architecture("Qwen3ForCausalLM", family) | grouped | dense
        case Family.QWEN3_MOE:
            return {
                **_architecture("Qwen3MoeForCausalLM", family),
                **grouped,
                **dense,
                "moe_intermediate_size": shape.expert,
                "num_experts": _EXPERTS,
                "num_experts_per_tok": _EXPERTS_OF_A_TOKEN,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case Family.DEEPSEEK_V3:
            return {
                **_architecture("DeepseekV3ForCausalLM", family),
                **dense,
                "num_key_value_heads": shape.heads,
                "moe_intermediate_size": shape.expert,
                "n_routed_experts": _EXPERTS,
                "num_experts_per_tok": _EXPERTS_OF_A_TOKEN,
                "n_shared_experts": 1,
                "first_k_dense_replace": shape.dense_layers,
                "moe_layer_freq": 1,
                "n_group": 2,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.5,
                "q_lora_rank": _Q_LORA,
                "kv_lora_rank": _KV_LORA,
                "qk_nope_head_dim": _QK_NOPE,
                "qk_rope_head_dim": _QK_ROPE,
                "v_head_dim": _V_HEAD,
                "num_nextn_predict_layers": 0,
                # SGLang's rotary embedding on a CPU has this kind alone.
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": shape.max_context_tokens // 4,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            }
        case _:
            assert_never(family)


def layer_tensors(
    family: Family, shape: Shape, layer: int, projection: Projections
) -> dict[str, torch.Tensor]:
    """The weights of one layer, by their names in the layer."""
    import torch

    is_mla = family is Family.DEEPSEEK_V3
    attention = (_latent_attention if is_mla else _grouped_attention)(shape, projection)
    has_experts = family is Family.QWEN3_MOE or (is_mla and layer >= shape.dense_layers)
    if has_experts:
        mlp = _experts(shape, projection)
        if is_mla:
            shared = _feed_forward("shared_experts", shape.hidden, shape.expert, projection)
            mlp |= {f"mlp.{name}": value for name, value in shared.items()}
            bias = torch.linspace(-0.1, 0.1, _EXPERTS)
            mlp["mlp.gate.e_score_correction_bias"] = bias
    else:
        mlp = _feed_forward("mlp", shape.hidden, shape.intermediate, projection)
    norms = {
        "input_layernorm.weight": torch.ones(shape.hidden),
        "post_attention_layernorm.weight": torch.ones(shape.hidden),
    }
    if family in (Family.QWEN3, Family.QWEN3_MOE):
        head_dim = shape.hidden // shape.heads
        norms |= {
            "self_attn.q_norm.weight": torch.ones(head_dim),
            "self_attn.k_norm.weight": torch.ones(head_dim),
        }
    return attention | mlp | norms


def _architecture(name: str, family: Family) -> dict[str, Any]:
    return {"architectures": [name], "model_type": family.value}


def _grouped_attention(shape: Shape, projection: Projections) -> dict[str, torch.Tensor]:
    head_dim = shape.hidden // shape.heads
    query_rows, kv_rows = shape.heads * head_dim, shape.kv_heads * head_dim
    return {
        "self_attn.q_proj.weight": projection(query_rows, shape.hidden),
        "self_attn.k_proj.weight": projection(kv_rows, shape.hidden),
        "self_attn.v_proj.weight": projection(kv_rows, shape.hidden),
        "self_attn.o_proj.weight": projection(shape.hidden, query_rows),
    }


def _latent_attention(shape: Shape, projection: Projections) -> dict[str, torch.Tensor]:
    import torch

    query_rows = shape.heads * (_QK_NOPE + _QK_ROPE)
    return {
        "self_attn.q_a_proj.weight": projection(_Q_LORA, shape.hidden),
        "self_attn.q_a_layernorm.weight": torch.ones(_Q_LORA),
        "self_attn.q_b_proj.weight": projection(query_rows, _Q_LORA),
        "self_attn.kv_a_proj_with_mqa.weight": projection(_KV_LORA + _QK_ROPE, shape.hidden),
        "self_attn.kv_a_layernorm.weight": torch.ones(_KV_LORA),
        "self_attn.kv_b_proj.weight": projection(shape.heads * (_QK_NOPE + _V_HEAD), _KV_LORA),
        "self_attn.o_proj.weight": projection(shape.hidden, shape.heads * _V_HEAD),
    }


def _experts(shape: Shape, projection: Projections) -> dict[str, torch.Tensor]:
    tensors = {"mlp.gate.weight": projection(_EXPERTS, shape.hidden)}
    for i in range(_EXPERTS):
        tensors |= _feed_forward(f"mlp.experts.{i}", shape.hidden, shape.expert, projection)
    return tensors


def _feed_forward(
    name: str, hidden: int, width: int, projection: Projections
) -> dict[str, torch.Tensor]:
    return {
        f"{name}.gate_proj.weight": projection(width, hidden),
        f"{name}.up_proj.weight": projection(width, hidden),
        f"{name}.down_proj.weight": projection(hidden, width),
    }
