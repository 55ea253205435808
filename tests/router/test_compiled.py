"""The router whose token path is compiled to C, as the wheel has it where there is a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from eval.fake_worker.worker import FakeWorker
from eval.routers.compiled import install
from ppd import __version__

from .conftest import CHAT_BODY
from .scripts import answering
from .test_process import CHAT, router

ROOT = Path(__file__).parents[2]


pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command that runs the compiled router."""
    site = install(tmp_path_factory.mktemp("site") / "compiled", ROOT)
    assert list(site.rglob("*.so")), "nothing was compiled"
    return ("env", f"PYTHONPATH={site}", sys.executable, "-P", "-m", "ppd_router.cli")


def test_it_says_that_it_is_compiled(python: tuple[str, ...]) -> None:
    version = subprocess.run([*python, "--version"], check=True, capture_output=True, text=True)
    assert version.stdout == f"{__version__} (compiled)\n"


async def test_it_serves_and_describes_itself(python: tuple[str, ...]) -> None:
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


async def test_it_serves_two_models(python: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    config.write_text("[models.red]\n[models.blue]\n")
    async with AsyncExitStack() as stack:
        flags = ["--port", "0", "--policy", "full", "--config", str(config)]
        decode = {}
        for model in ("red", "blue"):
            for role in ("prefill", "decode"):
                engine = FakeWorker(role, answering(), model=model)
                await stack.enter_async_context(engine.serving())
                flags += [f"--{role}", engine.url]
                decode[model] = engine
        running = await stack.enter_async_context(router(*flags, command=python))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = await running.url()
        for model, engine in decode.items():
            for stream in (False, True):
                body = CHAT_BODY | {"model": model, "stream": stream}
                async with http.post(url + CHAT, json=body) as response:
                    assert response.status == 200, await response.text()
                    assert await response.read()
            assert len(engine.legs) == 2
        async with http.post(url + CHAT, json=CHAT_BODY | {"model": "green"}) as response:
            assert response.status == 404
