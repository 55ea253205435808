"""``ppd-router`` as a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp

from .fake_engine import FakeEngine, answering

PPD_ROUTER = str(Path(sys.executable).with_name("ppd-router"))


async def test_it_serves_and_stops_on_sigterm() -> None:
    p, d = FakeEngine("prefill", answering()), FakeEngine("decode", answering())
    async with p.serving(), d.serving():
        process = await asyncio.create_subprocess_exec(
            *(PPD_ROUTER, "--prefill", p.url, "--decode", d.url, "--port", "0", "--policy", "pd"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), 10.0)).decode()
        url = line.split("listening on ")[1].strip()
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15.0) == 0
