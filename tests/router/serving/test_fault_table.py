"""Every row of ``ppd-eval bench fault-table``, played against a router of this process.

So each of our cells there is a test here, of the same name; what else is known of those
faults (metrics, endpoints, answers that do not stream) is in ``test_faults.py``.
"""

from __future__ import annotations

import pytest

from eval.faults.fixture import FaultFixture, faulty_workers
from eval.faults.rows import ROWS, Row
from ppd.contract import LOCAL_MARKER
from router.config.options import RouterConfig
from router.server.run import running

CELLS = [
    pytest.param(row, route == "local", id=f"{row.name}, {route}")
    for row in ROWS
    for route in row.routes
]


@pytest.mark.parametrize(("row", "local"), CELLS)
async def test_our_cells_are_right(row: Row, local: bool) -> None:
    prefill, decode, faults = faulty_workers("fake", row.decodes, row.ranks)
    workers = (prefill, *decode)
    for worker in workers:
        await worker.listen()
    config = RouterConfig(
        prefill=(prefill.url,),
        decode=tuple(worker.url for worker in decode),
        port=0,
        policy="full",
        probe_interval_s=0.05,
        answer_timeout_s=row.answer_timeout_s,
    )
    try:
        async with running(config) as url:
            port = int(url.rpartition(":")[2])
            fixture = FaultFixture(port, "fake", prefill, decode, faults, local)
            cell = await row.play(fixture)
            assert cell.right, cell.words
        # Without its home, or its KV there, a turn is remote.
        if local and row.decodes == row.ranks == 1:
            assert LOCAL_MARKER.encode() in decode[0].legs[-1].body
    finally:
        for worker in workers:
            await worker.close()
