"""Converts one GGUF file into a Hugging Face folder that SGLang loads.

It runs as a process of its own: ``python -m eval.gguf_conversion GGUF FOLDER``. transformers reads
the weights and dequantises them to float32. The tokenizer is made of the vocabulary and the merges
in the file: transformers 5.12 takes the wrong end token from this file, and splits digits less
than the model's own tokenizer does (llama.cpp's pre-tokenizer ``smollm``). At the end the folder is
loaded again, and its logits are compared with those of the GGUF file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_patches.cpu import stand_ins

PROMPT = (
    {"role": "user", "content": "The tide gauge was cleaned on Monday. When was it cleaned?"},
    {"role": "assistant", "content": "It was cleaned on Monday, at 06:00."},
    {"role": "user", "content": "What's the capital of France?\n\n  Answer in one word."},
)
_CONTROL = 3  # GGUF's type of a special token


def convert(gguf: Path, folder: Path) -> dict[str, Any]:
    """Write the folder, and compare its logits with those of the GGUF file.

    Returns:
        ``max_logit_difference`` over all positions of :data:`PROMPT`, ``prompt_tokens``, and the
        types of the tensors in the file with their numbers.
    """
    # transformers imports torchvision, whose operators do not load beside a CPU build of torch.
    stand_ins.install()
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    settings: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # 5.19 keeps GGUF's blocks unless it is told not to
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with torch.inference_mode():
        source = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **settings
        )
        if settings:  # the weights are dense now, and may be saved
            source.hf_quantizer = None
            vars(source.config).pop("quantization_config", None)
        tensor_types = _write_tokenizer(gguf, folder)
        source.generation_config = GenerationConfig(
            bos_token_id=source.config.bos_token_id,
            eos_token_id=source.config.eos_token_id,
            do_sample=True,
            temperature=0.2,  # both as the model's card has them; servers take them as defaults
            top_p=0.9,
        )
        source.save_pretrained(folder)
        _strip_name(folder / "config.json")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            list(PROMPT), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        difference = source(**prompt).logits - converted(**prompt).logits
    return {
        "max_logit_difference": float(difference.abs().max()),
        "prompt_tokens": int(prompt["input_ids"].shape[1]),
        "tensor_types": tensor_types,
    }


def _strip_name(path: Path) -> None:
    """Remove the name of the training run, which SGLang would show in place of the folder's."""
    config = json.loads(path.read_text())
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_tokenizer(gguf: Path, folder: Path) -> dict[str, int]:
    from collections import Counter

    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        assert found is not None, f"no tokenizer.{name} in {gguf.name}"
        return found.contents()

    kind = (field("ggml.model"), field("ggml.pre"))
    assert kind == ("gpt2", "smollm"), f"a tokenizer of another kind: {kind}"
    tokens: list[str] = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(text, special=True, normalized=False)
        for text, its_type in zip(tokens, field("ggml.token_type"), strict=True)
        if its_type == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == len(tokens), "a special token is not in the vocabulary"
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("ggml.bos_token_id")],
        "eos_token": tokens[field("ggml.eos_token_id")],
        "pad_token": tokens[field("ggml.padding_token_id")],
        "unk_token": tokens[field("ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "chat_template": field("chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return dict(Counter(tensor.tensor_type.name for tensor in reader.tensors))


def main() -> None:
    """Convert; the last line on stdout is one JSON object."""
    parser = argparse.ArgumentParser(description=convert.__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(json.dumps(convert(options.gguf, options.folder)))


if __name__ == "__main__":
    main()
