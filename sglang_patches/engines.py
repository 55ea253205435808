"""The differences between the SGLang versions that the plugin supports.

Engine objects and hook targets are reached by version here alone. ``targets.py`` checks the
signatures of the targets. The CPU stand-ins and the refused flags are of these versions, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ppd.errors import ConfigError


class Engine:
    """Access to engine objects by the names of SGLang 0.5.21.

    Attributes:
        moved: hook targets that have another dotted path in this version.
    """

    moved: Mapping[str, str] = {}

    def prefix_len(self, req: Any) -> int:
        """The number of tokens of ``req`` whose KV its next extend builds on."""
        return len(req.prefix_indices)

    def extend_end(self, req: Any) -> int:
        """The number of tokens of ``req`` with KV after its last scheduled extend."""
        return int(req.extend_range.end)

    def match_prefix(self, scheduler: Any, req: Any) -> None:
        """Look up the prompt of ``req`` in the cache; sets ``num_matched_prefix_tokens``."""
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(scheduler.tree_cache, req, req.origin_input_ids, include_req=True)

    def filter_batch(self, batch: Any, exclude: list[Any]) -> None:
        """Drop the finished requests of ``batch``, and those in ``exclude``."""
        batch.filter_batch(chunked_req_to_exclude=exclude)

    def send_abort(self, scheduler: Any, abort: Any, req: Any) -> None:
        """Send ``abort`` of ``req`` to the tokenizer manager."""
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)


class Engine0523(Engine):
    """Access to engine objects by the names of SGLang 0.5.23."""

    def prefix_len(self, req: Any) -> int:
        """See ``Engine``."""
        return int(req.prefix_len)

    def extend_end(self, req: Any) -> int:
        """See ``Engine``."""
        return int(req.extend_end)

    def match_prefix(self, scheduler: Any, req: Any) -> None:
        """See ``Engine``."""
        from sglang.srt.mem_cache.common import match_kv_cache

        match_kv_cache(req, scheduler.tree_cache, req.origin_input_ids)

    def filter_batch(self, batch: Any, exclude: list[Any]) -> None:
        """See ``Engine``."""
        batch.filter_batch(reqs_to_exclude=exclude)

    def send_abort(self, scheduler: Any, abort: Any, req: Any) -> None:
        """See ``Engine``."""
        scheduler.send_abort_output(abort, req)


ENGINES: dict[str, type[Engine]] = {"0.5.21": Engine, "0.5.23": Engine0523}
SUPPORTED = tuple(ENGINES)
VERSIONS = " and ".join(SUPPORTED)


@cache
def engine() -> Engine:
    """The access to engine objects of the installed SGLang.

    Raises:
        ConfigError: the plugin does not support the installed version.
    """
    from sglang.version import __version__ as installed

    try:
        return ENGINES[installed]()
    except KeyError:
        raise ConfigError(
            f"the hooks fit SGLang {VERSIONS}, not the installed {installed}"
        ) from None
