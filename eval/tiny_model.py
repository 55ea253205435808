"""Makes small random language models that any SGLang server can load.

Tests, the demo and CPU benchmarks need a model whose greedy output varies from position to
position, and whose files are made in seconds. For most of them its text must round-trip: decoding
ids and encoding the text again gives the same ids.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from ppd.errors import ConfigError

from .model_cache import build_once, cache_folder
from .tiny_layers import Family, Projections, Shape, family_config, layer_tensors

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
_CHARACTERS = [c for c in string.printable if c not in "\r\x0b\x0c"]
_FORMAT = 1  # raise when the same spec would give other files


class Vocabulary(StrEnum):
    """A tokenizer: ``CHARACTERS`` round-trips, ``BPE`` may cut generated text anew."""

    CHARACTERS = "characters"
    BPE = "bpe"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The settings that determine a model's files, and so the name of its folder."""

    family: Family = Family.LLAMA
    vocabulary: Vocabulary = Vocabulary.CHARACTERS
    dtype: str = "float32"
    seed: int = 0
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    max_context_tokens: int = 32768

    @property
    def name(self) -> str:
        """The name of its folder, with a hash of its settings."""
        digest = hashlib.sha256(json.dumps([_FORMAT, asdict(self)]).encode()).hexdigest()
        return f"tiny-{self.family}-{self.vocabulary}-{self.dtype}-{digest[:8]}"


def ensure(spec: ModelSpec | None = None, root: Path | None = None) -> Path:
    """The folder of ``spec``'s model, made now if it is not there yet."""
    made = spec or ModelSpec()
    return build_once((root or cache_folder()) / made.name, lambda folder: _write(made, folder))


def resolve(model: str | None) -> str:
    """The model to serve: the caller's, else the small default one.

    Raises:
        ConfigError: it looks like a folder, and there is none.
    """
    if model is None:
        return str(ensure())
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(f"no such model folder: {model}")
    return model


def _write(spec: ModelSpec, folder: Path) -> None:
    vocabulary_size = _write_tokenizer(spec, folder)
    _write_weights(spec, vocabulary_size, folder)


def _write_tokenizer(spec: ModelSpec, folder: Path) -> int:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    match spec.vocabulary:
        case Vocabulary.CHARACTERS:
            # An unknown character becomes <|unk|>: falling back to bytes would not round-trip.
            ids = {text: i for i, text in enumerate((*SPECIAL_TOKENS, *_CHARACTERS))}
            tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<|unk|>"))
            tokenizer.decoder = decoders.Fuse()
            tokenizer.add_special_tokens(special)
        case Vocabulary.BPE:
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=512,
                special_tokens=special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            tokenizer.train_from_iterator([_training_text()], trainer)
        case _:
            assert_never(spec.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "unk_token": "<|unk|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.max_context_tokens,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return int(tokenizer.get_vocab_size())


def _training_text() -> str:
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")]
    return " ".join(a + b for a in syllables for b in syllables)


def _write_weights(spec: ModelSpec, vocabulary_size: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = {
        "dtype": spec.dtype,
        "vocab_size": vocabulary_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": spec.max_context_tokens,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    shape = Shape(spec.hidden, spec.heads, spec.kv_heads, spec.layers, spec.max_context_tokens)
    _write_json(folder / "config.json", config | family_config(spec.family, shape))
    _write_json(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})

    projection = Projections(spec.seed)
    tensors = {
        "model.embed_tokens.weight": projection(vocabulary_size, spec.hidden, spec.hidden**0.5),
        "model.norm.weight": torch.ones(spec.hidden),
        "lm_head.weight": projection(vocabulary_size, spec.hidden),
    }
    # Special tokens are never the maximum: replies run to max_tokens and stay printable.
    tensors["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0.0
    for i in range(spec.layers):
        layer = layer_tensors(spec.family, shape, i, projection)
        tensors |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    dtype = getattr(torch, spec.dtype)
    save_file(
        {name: value.to(dtype).contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
