"""The router's configuration file: TOML with the fields of ``RouterConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ppd.errors import ConfigError

from .decoding import decode_fields, read_toml
from .options import RouterConfig

_WORKERS = ("prefill", "decode", "replica", "accept_workers", "workers_file", "kubernetes")


def read_config(path: str, flags: Mapping[str, Any]) -> RouterConfig:
    """Return the configuration of a file and of the command line's flags.

    Values out of range are reported by ``RouterConfig.check``, not here, unless the file has
    another fault.

    Args:
        path: of the TOML file.
        flags: fields that replace the file's.

    Raises:
        ConfigError: the file cannot be read, or has unknown, missing or wrongly typed fields.
            The message lists all of them.
    """
    content = read_toml(path)
    wrong: list[str] = []
    fields = decode_fields(RouterConfig, content, wrong)
    config = msgspec.structs.replace(RouterConfig(**fields), **flags)
    if not wrong:
        return config
    found = config.problems()
    if any(name in content and name not in fields for name in _WORKERS):
        # The wrong field may have listed the workers that seem to be missing.
        found = [problem for problem in found if not problem.startswith("at least one")]
    raise ConfigError(f"{path}: {'; '.join([*sorted(wrong), *found])}")
