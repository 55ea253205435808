"""The differences between the SGLang versions that the plugin supports.

Engine objects and hook targets are reached by version here alone. ``targets.py`` checks the
signatures of the targets. The CPU stand-ins and the refused flags are of these versions, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ppd.errors import ConfigError

logger = logging.getLogger("ppd.engine")


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


@dataclass(frozen=True, slots=True)
class Installed:
    """The SGLang that this process imports.

    Attributes:
        version: the version that it declares; None for a source tree that declares none.
        folder: of the package ``sglang``.
        is_tree: whether it is a source tree that shadows the installed distribution.
    """

    version: str | None
    folder: Path
    is_tree: bool

    @property
    def read_as(self) -> str:
        """The version by whose names the plugin reads it.

        A tree without a version is read as the newest supported one. The signatures of all hook
        targets are compared in any case.
        """
        return SUPPORTED[-1] if self.version is None else self.version

    def __str__(self) -> str:
        """Describe it for messages."""
        if not self.is_tree:
            return f"the installed {self.version}"
        declared = "which declares no version" if self.version is None else self.version
        return f"the source tree {self.folder} ({declared})"


def installed() -> Installed:
    """Find the SGLang that this process imports, and the version that it declares.

    A source tree has its version in ``_version.py``, which a checkout lacks. SGLang then reports
    the version of the installed distribution, whose code it is not (sglang/version.py).
    """
    import sglang.version

    folder = Path(sglang.version.__file__).parent.resolve()
    try:
        is_tree = Path(str(distribution("sglang").locate_file("sglang"))).resolve() != folder
    except PackageNotFoundError:
        is_tree = True
    declares = not is_tree or (folder / "_version.py").exists()
    return Installed(sglang.version.__version__ if declares else None, folder, is_tree)


@cache
def engine() -> Engine:
    """The access to engine objects of the imported SGLang.

    Raises:
        ConfigError: the plugin does not support its version.
    """
    found = installed()
    if found.is_tree:
        logger.warning("SGLang is %s; it is read as %s", found, found.read_as)
    try:
        return ENGINES[found.read_as]()
    except KeyError:
        raise ConfigError(f"the hooks fit SGLang {VERSIONS}, not {found}") from None
