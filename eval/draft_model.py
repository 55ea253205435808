"""Makes small models with EAGLE drafts, to try speculative decoding without a trained draft.

The target is a small model of ``tiny_model`` with one layer and token embeddings of unit RMS. The
EAGLE draft is that very layer: it has no input norm, and embeddings of unit RMS need none. It sees
the conversation without its first token, so nearly all of its tokens are accepted. The draft of a
DeepSeek-V3 target has the form of its multi-token prediction (MTP, NextN in SGLang).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .model_cache import build_once, cache_folder
from .tiny_layers import Family
from .tiny_model import ModelSpec, ensure

_FORMAT = 1  # raise when the same spec would give other files
_CAPTURED = (0, 1, 2)  # layers behind which EAGLE-3 reads hidden states
_TARGET, _DRAFT = "target", "draft"
STEPS = 4  # of a draft in these flags; its chain has as many tokens


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """The settings that determine the files of a target and its draft.

    Attributes:
        target: the target; for an EAGLE draft it is made with one layer.
        eagle3: whether the draft has the form of EAGLE-3, which reads hidden states of three
            layers. Its layer's residual is such a state, so that hardly any token is accepted.
        hidden_gain: share of the target's hidden state in the draft's input. Above 0 the draft's
            tokens depend on it, and fewer of them are accepted.
    """

    target: ModelSpec = field(default_factory=ModelSpec)
    eagle3: bool = False
    hidden_gain: float = 0.0

    @property
    def name(self) -> str:
        """The name of its folder, with a hash of its settings."""
        digest = hashlib.sha256(json.dumps([_FORMAT, asdict(self)]).encode()).hexdigest()
        kind = "eagle3" if self.eagle3 else "mtp" if self.is_mtp else "eagle"
        return f"{kind}-{digest[:8]}"

    @property
    def is_mtp(self) -> bool:
        """Whether the draft is a layer of DeepSeek-V3's multi-token prediction."""
        return self.target.family is Family.DEEPSEEK_V3

    @property
    def algorithm(self) -> str:
        """The value of SGLang's ``--speculative-algorithm``; ``NEXTN`` resolves to ``EAGLE``."""
        return "EAGLE3" if self.eagle3 else "NEXTN" if self.is_mtp else "EAGLE"


def ensure_pair(spec: DraftSpec | None = None, root: Path | None = None) -> tuple[Path, Path]:
    """The folders of a target and its draft, made now if they are not there yet."""
    made = spec or DraftSpec()
    folder = build_once((root or cache_folder()) / made.name, lambda new: _write(made, new))
    return folder / _TARGET, folder / _DRAFT


def draft_flags(draft: Path, algorithm: str, steps: int = STEPS) -> tuple[str, ...]:
    """SGLang's flags for chains of ``steps`` draft tokens."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(steps + 1)),
    )


def _write(spec: DraftSpec, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = ensure(spec.target if spec.eagle3 else replace(spec.target, layers=1))
    target, draft = folder / _TARGET, folder / _DRAFT
    shutil.copytree(source, target)
    draft.mkdir()
    weights = load_file(source / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    rms = embeddings.pow(2).mean(dim=1, keepdim=True).sqrt()
    weights["model.embed_tokens.weight"] = embeddings / rms
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = 1
    if spec.is_mtp:
        config["num_nextn_predict_layers"] = 1
    else:
        form = "Eagle3" if spec.eagle3 else "Eagle"
        config["architectures"] = [f"LlamaForCausalLM{form}"]
    if spec.eagle3:
        config |= {
            "draft_vocab_size": config["vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(_CAPTURED)},
        }
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    make = _eagle3 if spec.eagle3 else _mtp if spec.is_mtp else _eagle
    made = make(spec, weights)
    save_file(made, draft / "model.safetensors", metadata={"format": "pt"})


def _eagle(spec: DraftSpec, weights: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE draft: ``fc`` takes [embedding, hidden state]."""
    import torch

    return {
        **_layer(weights, without="input_layernorm"),
        "fc.weight": _mixing(spec),
        "fc.bias": torch.zeros(spec.target.hidden),
    }


def _mtp(spec: DraftSpec, weights: dict[str, Any]) -> dict[str, Any]:
    """A layer of MTP: ``eh_proj`` takes [embedding, hidden state], both normalised."""
    import torch

    ones = torch.ones(spec.target.hidden)
    made = {
        **_layer(weights),
        "layers.0.eh_proj.weight": _mixing(spec),
        "layers.0.enorm.weight": ones,
        "layers.0.hnorm.weight": ones.clone(),
        "layers.0.shared_head.norm.weight": weights["model.norm.weight"].clone(),
    }
    return {f"model.{name}": value for name, value in made.items()}


def _mixing(spec: DraftSpec) -> Any:
    """The projection of [embedding, hidden state]: the embedding, and some of the other."""
    import torch

    hidden = spec.target.hidden
    generator = torch.Generator().manual_seed(spec.target.seed)
    mixing = torch.randn(hidden, hidden, generator=generator) * (spec.hidden_gain / hidden**0.5)
    return torch.cat((torch.eye(hidden), mixing), dim=1).contiguous()


def _eagle3(spec: DraftSpec, weights: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE-3 draft: its layer attends to [embedding, hidden state]; ``fc`` takes three."""
    import torch

    hidden = spec.target.hidden
    generator = torch.Generator().manual_seed(spec.target.seed)
    made = {f"midlayer.{name.removeprefix('layers.0.')}": v for name, v in _layer(weights).items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"midlayer.self_attn.{name}.weight"
        made[key] = torch.cat((made[key], spec.hidden_gain * made[key]), dim=1).contiguous()
    return {
        **made,
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "fc.weight": torch.randn(hidden, 3 * hidden, generator=generator) / (3 * hidden) ** 0.5,
        "lm_head.weight": weights["lm_head.weight"].clone(),
        "d2t": torch.zeros(weights["lm_head.weight"].shape[0], dtype=torch.int64),
    }


def _layer(weights: dict[str, Any], without: str | None = None) -> dict[str, Any]:
    prefix = "model."
    return {
        name.removeprefix(prefix): value.clone()
        for name, value in weights.items()
        if name.startswith(f"{prefix}layers.0.") and (without is None or without not in name)
    }
