"""What differs between the SGLang versions that the plugin fits; nothing else here asks for one.

The hooks' targets have the same signatures in all of them (``targets.py`` checks that).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ppd.errors import ConfigError


class Engine:
    """The names of SGLang 0.5.21."""

    def prefix_len(self, req: Any) -> int:
        """Tokens of ``req`` whose KV its next extend builds on."""
        return len(req.prefix_indices)

    def extend_end(self, req: Any) -> int:
        """Tokens of ``req`` that have KV after the extend it was last scheduled for."""
        return int(req.extend_range.end)

    def match_prefix(self, scheduler: Any, req: Any) -> None:
        """Look up ``req``'s prompt in the cache; sets ``num_matched_prefix_tokens``."""
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(scheduler.tree_cache, req, req.origin_input_ids, include_req=True)

    def filter_batch(self, batch: Any, exclude: list[Any]) -> None:
        """Drop the finished requests and those in ``exclude``."""
        batch.filter_batch(chunked_req_to_exclude=exclude)

    def send_abort(self, scheduler: Any, abort: Any, req: Any) -> None:
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)


class Engine0523(Engine):
    """The names of SGLang 0.5.23."""

    def prefix_len(self, req: Any) -> int:
        return int(req.prefix_len)

    def extend_end(self, req: Any) -> int:
        return int(req.extend_end)

    def match_prefix(self, scheduler: Any, req: Any) -> None:
        from sglang.srt.mem_cache.common import match_kv_cache

        match_kv_cache(req, scheduler.tree_cache, req.origin_input_ids)

    def filter_batch(self, batch: Any, exclude: list[Any]) -> None:
        batch.filter_batch(reqs_to_exclude=exclude)

    def send_abort(self, scheduler: Any, abort: Any, req: Any) -> None:
        scheduler.send_abort_output(abort, req)


ENGINES: dict[str, type[Engine]] = {"0.5.21": Engine, "0.5.23": Engine0523}
VERSIONS = " and ".join(ENGINES)


@cache
def engine() -> Engine:
    """The installed SGLang's.

    Raises:
        ConfigError: the plugin was never tried with that version.
    """
    from sglang.version import __version__ as installed

    try:
        return ENGINES[installed]()
    except KeyError:
        raise ConfigError(
            f"the hooks fit SGLang {VERSIONS}, not the installed {installed}"
        ) from None
