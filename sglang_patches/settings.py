"""The plugin's options: environment variables named ``PPD_*``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ppd.errors import ConfigError

ENABLE = "PPD_ENABLE"
MAX_APPEND_TOKENS = "PPD_MAX_APPEND_TOKENS"
TPOT_TARGET_MS = "PPD_TPOT_TARGET_MS"
APPEND_CHUNK = "PPD_APPEND_CHUNK"
UNROOMED = "PPD_UNROOMED"
LINK_GBPS = "PPD_LINK_GBPS"
ROUTERS = "PPD_ROUTERS"
ADVERTISE_URL = "PPD_ADVERTISE_URL"
WORKER_TOKEN = "PPD_WORKER_TOKEN"
KNOWN = (
    ENABLE,
    MAX_APPEND_TOKENS,
    TPOT_TARGET_MS,
    APPEND_CHUNK,
    UNROOMED,
    LINK_GBPS,
    ROUTERS,
    ADVERTISE_URL,
    WORKER_TOKEN,
)

# Of other programs: the router's, which may be in the same file of variables, and those that
# Kubernetes sets in every pod for a Service that is named "ppd", or begins with "ppd-".
_OTHERS = re.compile(
    r"PPD_(WORKER_API_KEY|ADMIN_TOKEN|MILVUS_TOKEN|CHROMA_TOKEN|COMPILE)"
    r"|PPD_SHARED_(PASSWORD|RESPONSES_KEY)"
    r"|PPD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

_MAX_APPEND_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of an enabled plugin; all other sizes come from SGLang's own flags.

    Attributes:
        max_append_tokens: uncached tokens of local requests that may wait or be in prefill at a
            time. A request beyond them is refused before any work, and the router sends it remote.
            A router has a smaller budget of its own; this one holds for all routers.
        tpot_target_ms: the TPOT to keep for running decodes beside local prefill. None: half as
            long again as they take without local prefill.
        append_chunk: tokens of each chunk beside running decodes, in place of a target.
        unroomed: prefill requests without a bootstrap room here, as if they had a marker. Routers
            that leave the prefill worker out (llm-d) send such requests.
        link_gbps: gigabits a second of this worker's link to the others, by which routers choose
            a shipped table; by default that of the devices of ``--disaggregation-ib-device``.
        routers: base URLs of the routers to announce this worker to.
        advertise_url: base URL under which routers reach this worker; by default it is derived
            from ``--host`` and ``--port``, or from the address on the way to the router.
        worker_token: the routers' shared secret for announcements.
    """

    max_append_tokens: int = _MAX_APPEND_TOKENS
    tpot_target_ms: float | None = None
    append_chunk: int | None = None
    unroomed: bool = False
    link_gbps: float | None = None
    routers: tuple[str, ...] = ()
    advertise_url: str | None = None
    worker_token: str | None = None


def read_settings(environment: Mapping[str, str]) -> Settings | None:
    """Read the options from the environment; None if the plugin is not enabled.

    Raises:
        ConfigError: an option is malformed, or a ``PPD_*`` name is unknown.
    """
    if not _switch(environment, ENABLE):
        return None
    unknown = sorted(
        name
        for name in environment
        if name.startswith("PPD_") and name not in KNOWN and not _OTHERS.fullmatch(name)
    )
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(KNOWN)}")
    settings = Settings(
        max_append_tokens=_whole(environment, MAX_APPEND_TOKENS) or _MAX_APPEND_TOKENS,
        tpot_target_ms=_number(environment, TPOT_TARGET_MS),
        append_chunk=_whole(environment, APPEND_CHUNK),
        unroomed=_switch(environment, UNROOMED),
        link_gbps=_number(environment, LINK_GBPS),
        routers=tuple(
            _base_url(ROUTERS, url) for url in environment.get(ROUTERS, "").split(",") if url
        ),
        advertise_url=(
            _base_url(ADVERTISE_URL, url) if (url := environment.get(ADVERTISE_URL)) else None
        ),
        worker_token=environment.get(WORKER_TOKEN) or None,
    )
    token = settings.worker_token or ""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(f"{WORKER_TOKEN} must be printable ASCII without spaces")
    if settings.tpot_target_ms is not None and settings.append_chunk is not None:
        raise ConfigError(f"{TPOT_TARGET_MS} chooses the chunk, {APPEND_CHUNK} fixes it: give one")
    return settings


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise ConfigError(f"{name} must be a whole number above 0, got {text!r}")
    return int(text)


def _number(environment: Mapping[str, str], name: str) -> float | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 1e6:  # also for NaN
        raise ConfigError(f"{name} must be a number from 0.1 to 1e6, got {text!r}")
    return value


def _base_url(name: str, text: str) -> str:
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        valid = False
    if not valid or parts.path or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{name} must be http://HOST:PORT, got {text!r}")
    return url
