"""The plugin's options: environment variables named ``PPD_*``."""

from __future__ import annotations

from collections.abc import Mapping

from ppd.errors import ConfigError

_KNOWN = ("PPD_ENABLE",)


def is_enabled(environment: Mapping[str, str]) -> bool:
    """Whether the plugin shall change anything; sizes come from SGLang's own flags.

    Raises:
        ConfigError: ``PPD_ENABLE`` is neither 0 nor 1, or a ``PPD_*`` name is unknown.
    """
    enabled = environment.get("PPD_ENABLE", "0")
    if enabled not in ("0", "1"):
        raise ConfigError(f"PPD_ENABLE must be 0 or 1, got {enabled!r}")
    if enabled == "0":
        return False
    unknown = sorted(n for n in environment if n.startswith("PPD_") and n not in _KNOWN)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    return True
