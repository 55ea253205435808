"""The Llama whose steps are measured computes what transformers' does.

Not collected by itself: ``test_gpu_model.py`` runs it in a process where Triton interprets, or on a
GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.profiles.gpu_model import Attention, Dimensions, Layer, Llama, Weights
from eval.profiles.profile import Extend, Step
from sglang_patches.cpu import stand_ins

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
WAYS = list(Attention) if CUDA else [Attention.PLAIN]
OF = Dimensions(hidden=64, layers=2, heads=4, kv_heads=2, head=64, inner=96, vocabulary=128)


@pytest.fixture(scope="module")
def theirs() -> Any:
    if not CUDA:
        stand_ins.install()  # transformers imports torchvision
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=OF.hidden,
        num_hidden_layers=OF.layers,
        num_attention_heads=OF.heads,
        num_key_value_heads=OF.kv_heads,
        head_dim=OF.head,
        intermediate_size=OF.inner,
        vocab_size=OF.vocabulary,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).to(DEVICE, DTYPE).eval()


def copied(model: Any) -> Weights:
    state = model.state_dict()

    def of(number: int, *names: str) -> torch.Tensor:
        return torch.cat([state[f"model.layers.{number}.{name}.weight"] for name in names])

    layers = tuple(
        Layer(
            of(i, "input_layernorm"),
            of(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            of(i, "self_attn.o_proj"),
            of(i, "post_attention_layernorm"),
            of(i, "mlp.gate_proj", "mlp.up_proj"),
            of(i, "mlp.down_proj"),
        )
        for i in range(OF.layers)
    )
    return Weights(
        state["model.embed_tokens.weight"],
        layers,
        state["model.norm.weight"],
        state["lm_head.weight"],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_an_append_a_decode_and_both_at_once(theirs: Any, way: Attention) -> None:
    model = Llama(OF, copied(theirs), 64)
    first = torch.randint(OF.vocabulary, (1, 10), device=DEVICE)
    second = torch.randint(OF.vocabulary, (1, 5), device=DEVICE)
    with torch.no_grad():
        logits = theirs(first).logits[0]
        of_second = theirs(second).logits[0, -1]

    def step(shape: Step, ids: torch.Tensor) -> torch.Tensor:
        return model.prepared(shape, way)(ids)

    close = {"rtol": 0.05, "atol": 0.05} if CUDA else {"rtol": 1e-4, "atol": 1e-4}
    prompt = step(Step((Extend(6, 0),)), first[0, :6])
    torch.testing.assert_close(prompt, logits[5:6], **close)
    append = step(Step((Extend(2, 6),)), first[0, 6:8])
    torch.testing.assert_close(append, logits[7:8], **close)
    decode = step(Step((), 1, 9), first[0, 8:9])
    torch.testing.assert_close(decode, logits[8:9], **close)
    both = step(Step((Extend(5, 0),), 1, 10), torch.cat([second[0], first[0, 9:10]]))
    torch.testing.assert_close(both, torch.stack([of_second, logits[9]]), **close)
