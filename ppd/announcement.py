"""The announcement that a worker sends to routers every few seconds and when it leaves.

An announcement is a hint: the router performs its handshake with the worker before it sends work
there. Unknown fields are ignored, so that workers and routers can be upgraded one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ppd.contract import Count, Role, WorkerDescription, WorkerLoad
from ppd.errors import ContractError

PATH = "/workers"
INTERVAL_S = 3.0


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat of a worker.

    Attributes:
        url: base URL under which routers reach the worker.
        boot_id: random name of the worker's process (``WorkerDescription``).
        load: of the worker; of several ranks the first one's.
        loads: of each rank of data parallelism, in their order; empty if there is one.
        models: names of the models that it serves.
        bootstrap_port: port of a prefill worker's bootstrap server.
        page_size: tokens of a KV page.
        versions: versions of ``sglang`` and ``sglang-ppd``.
        capabilities: ``local_prefill`` is the only one so far.
        flushes: how often the process has flushed its whole KV cache; None if not reported.
        leaving: the worker takes no more work.
    """

    url: str
    role: Role
    boot_id: str
    models: tuple[str, ...] = ()
    bootstrap_port: Count = 0
    page_size: Count = 1
    versions: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    load: WorkerLoad = WorkerLoad()
    loads: tuple[WorkerLoad, ...] = ()
    flushes: Count | None = None
    leaving: bool = False

    @property
    def loads_of_ranks(self) -> tuple[WorkerLoad, ...]:
        """The load of each rank, where there is only one, too."""
        return self.loads or (self.load,)


class Acknowledgement(msgspec.Struct, frozen=True):
    """The router's answer to an announcement.

    Attributes:
        workers: how many workers the router has.
    """

    workers: int


def announce(
    descriptions: Iterable[WorkerDescription],
    *,
    url: str,
    role: Role,
    models: tuple[str, ...],
    bootstrap_port: int,
    page_size: int,
    sglang_version: str,
) -> Announcement:
    """Return the announcement of a worker whose ranks describe themselves so, in any order."""
    ranks = sorted(descriptions, key=lambda description: description.dp_rank)
    description = ranks[0]
    loads = tuple(rank.load() for rank in ranks)
    return Announcement(
        url=url,
        role=role,
        boot_id=description.boot_id,
        models=models,
        bootstrap_port=bootstrap_port,
        page_size=page_size,
        versions={"sglang": sglang_version, "sglang-ppd": description.plugin_version},
        capabilities=("local_prefill",) if description.local_prefill else (),
        load=loads[0],
        loads=loads if len(loads) > 1 else (),
        flushes=description.flushes,
    )


def parse(data: bytes) -> Announcement:
    """Parse the body of an announcement.

    Raises:
        ContractError: the body is no announcement; the message names the field.
    """
    try:
        return msgspec.json.decode(data, type=Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"no announcement: {error}") from error
