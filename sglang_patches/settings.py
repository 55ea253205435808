"""The plugin's options: environment variables named ``PPD_*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppd.errors import ConfigError

_ENABLE = "PPD_ENABLE"
_MAX_APPEND_TOKENS = "PPD_MAX_APPEND_TOKENS"
_KNOWN = (_ENABLE, _MAX_APPEND_TOKENS)


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of an enabled plugin; all other sizes come from SGLang's own flags.

    Attributes:
        max_append_tokens: uncached tokens of local requests that wait or prefill at a time. A
            router reserves less for itself; this holds whatever routers there are.
    """

    max_append_tokens: int = 65_536


def read_settings(environment: Mapping[str, str]) -> Settings | None:
    """The options; None if the plugin shall change nothing.

    Raises:
        ConfigError: an option is malformed, or a ``PPD_*`` name is unknown.
    """
    enabled = environment.get(_ENABLE, "0")
    if enabled not in ("0", "1"):
        raise ConfigError(f"{_ENABLE} must be 0 or 1, got {enabled!r}")
    if enabled == "0":
        return None
    unknown = sorted(n for n in environment if n.startswith("PPD_") and n not in _KNOWN)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    text = environment.get(_MAX_APPEND_TOKENS)
    if text is None:
        return Settings()
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise ConfigError(f"{_MAX_APPEND_TOKENS} must be a whole number above 0, got {text!r}")
    return Settings(max_append_tokens=int(text))
