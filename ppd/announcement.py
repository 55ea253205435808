"""The announcement that a worker sends to routers every few seconds and when it leaves.

An announcement is a hint: the router performs its handshake with the worker before it sends work
there. Unknown fields are ignored, so that workers and routers can be upgraded one by one.
"""

from __future__ import annotations

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
    flushes: Count | None = None
    leaving: bool = False


class Acknowledgement(msgspec.Struct, frozen=True):
    """The router's answer to an announcement.

    Attributes:
        workers: how many workers the router has.
    """

    workers: int


def announce(
    description: WorkerDescription,
    *,
    url: str,
    role: Role,
    models: tuple[str, ...],
    bootstrap_port: int,
    page_size: int,
    sglang_version: str,
) -> Announcement:
    """The announcement of a worker that has this description."""
    return Announcement(
        url=url,
        role=role,
        boot_id=description.boot_id,
        models=models,
        bootstrap_port=bootstrap_port,
        page_size=page_size,
        versions={"sglang": sglang_version, "sglang-ppd": description.plugin_version},
        capabilities=("local_prefill",) if description.local_prefill else (),
        load=description.load(),
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
