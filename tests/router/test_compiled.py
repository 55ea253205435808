"""The router whose token path is compiled to C, as ``make wheel COMPILE=1`` builds it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import aiohttp
import pytest

from eval.fake_worker.worker import FakeWorker
from eval.routers.compiled import install

from .conftest import CHAT_BODY
from .scripts import answering
from .test_process import CHAT, router

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@pytest.mark.timeout(900)
async def test_it_serves_and_describes_itself(tmp_path: Path) -> None:
    site = install(tmp_path / "compiled", ROOT)
    assert list(site.rglob("*.so")), "nothing was compiled"
    python = ("env", f"PYTHONPATH={site}", sys.executable, "-P", "-m", "ppd_router.cli")
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        flags = ("--port", "0", "--policy", "pd", "--prefill", p.url, "--decode", d.url)
        async with router(*flags, command=python) as running:
            url = await running.url()
            for stream in (False, True):
                async with http.post(url + CHAT, json=CHAT_BODY | {"stream": stream}) as response:
                    assert response.status == 200, await response.text()
                    assert await response.read()
            async with http.get(f"{url}/openapi.json") as response:
                assert CHAT in (await response.json())["paths"]
