"""``ppd-eval bench shared`` prints one JSON line with plausible numbers."""

from __future__ import annotations

import json
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE

import pytest

from eval.store_server import program


async def test_the_bench_prints_one_line() -> None:
    if program() is None:
        pytest.skip("neither valkey-server nor redis-server is installed (make system)")
    flags = ("--sessions", "10640", "--seconds", "1", "--rate", "200", "--routers", "2")
    process = await create_subprocess_exec(
        *(sys.executable, "-m", "ppd_eval", "bench", "shared", *flags), stdout=PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    (line,) = output.decode().splitlines()
    row = json.loads(line)
    assert 0 < row["queue_us_median"] < 50
    assert 0 < row["visible_ms_median"] < 1000
    assert 20 < row["store_bytes_per_record"] < row["store_bytes_per_record_alone"] < 1000
    # So few sessions are within what the allocator gives back by chance.
    assert abs(row["router_bytes_per_session"]) < 1000
    assert (row["sessions"], row["routers"], row["rate"]) == (10640, 2, 200)
