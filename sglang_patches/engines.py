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
        speculative_algorithms: those with which a decode server may keep a radix cache.
    """

    moved: Mapping[str, str] = {}
    speculative_algorithms: frozenset[str] = frozenset()

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

    def decode_reserve(self) -> int:
        """The number of tokens beyond the committed ones for which a decoding row holds KV."""
        return 0

    def accepted(self, scheduler: Any) -> tuple[int, int]:
        """Tokens that speculation has generated since start, and the row steps that it took."""
        return 0, 0


class Engine0523(Engine):
    """Access to engine objects by the names of SGLang 0.5.23."""

    # Upstream refuses the others beside the radix cache (arg_groups/speculative_hook.py:161);
    # NEXTN and MTP resolve to EAGLE. DSPARK is permitted there and was never tried here.
    speculative_algorithms = frozenset({"EAGLE", "EAGLE3"})

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

    def decode_reserve(self) -> int:
        """See ``Engine``."""
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
        from sglang.srt.runtime_context import get_spec

        if get_spec().speculative_algorithm is None:
            return 0
        return int(get_alloc_reserve_per_decode())

    def accepted(self, scheduler: Any) -> tuple[int, int]:
        """See ``Engine``."""
        report = scheduler.metrics_reporter
        return (
            report.spec_num_accept_tokens + report.spec_total_num_accept_tokens,
            report.spec_num_forward_ct + report.spec_total_num_forward_ct,
        )


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
