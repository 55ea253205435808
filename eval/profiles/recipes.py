"""Which profiles are made, and by which names and options aiconfigurator has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """One profile to make.

    Attributes:
        model: as the package names it.
        calibrations: beside that of device time.
    """

    name: str
    title: str
    gpu: str
    model: str
    system: str
    tensor_parallel: int
    options: dict[str, str | int] = field(default_factory=dict)


_BF16: dict[str, str | int] = {"fmha_quant_mode": "bfloat16", "kvcache_quant_mode": "bfloat16"}
_LLAMA, _QWEN = "meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-32B"
RECIPES = (
    Recipe("llama-3.1-8b-h100-tp1", "Llama-3.1-8B", "H100 SXM", _LLAMA, "h100_sxm", 1),
    Recipe("llama-3.1-8b-h200-tp1", "Llama-3.1-8B", "H200 SXM", _LLAMA, "h200_sxm", 1),
    Recipe("llama-3.1-8b-l40s-tp1", "Llama-3.1-8B", "L40S", _LLAMA, "l40s", 1),
    Recipe("qwen3-32b-h100-tp2", "Qwen3-32B", "H100 SXM", _QWEN, "h100_sxm", 2),
    Recipe("qwen3-32b-h100-tp4", "Qwen3-32B", "H100 SXM", _QWEN, "h100_sxm", 4),
    Recipe(
        "deepseek-v3-h200-tp8",
        "DeepSeek-V3",
        "H200 SXM",
        "deepseek-ai/DeepSeek-V3",
        "h200_sxm",
        8,
        {"moe_tp_size": 8, "moe_ep_size": 1, **_BF16},
    ),
)


def recipe_of(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ConfigError: there is none.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise ConfigError(f"no recipe {name!r}; known: {', '.join(one.name for one in RECIPES)}")
