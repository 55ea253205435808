"""The processes of one port share by the store, as routers on other hosts do."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from eval.fake_worker.worker import FakeWorker
from eval.store_server import StoreServer
from router.config.options import RouterConfig
from router.config.shared import SharedConfig
from router.server.supervisor import share_of

from ..conftest import Client
from ..fixtures import serving
from ..scripts import answering
from ..test_process import router, two_free_ports
from .test_killed_replica import continues


async def test_turns_that_change_the_process_are_local(server: StoreServer, tmp_path: Path) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering(cached=96))
    first = two_free_ports()
    file = tmp_path / "router.toml"
    file.write_text(
        f'admin_port = {first}\nprocesses = 2\nport = 0\npolicy = "full"\n'
        f'prefill = ["http://127.0.0.1:%d"]\ndecode = ["http://127.0.0.1:%d"]\n'
        f'[shared]\nurl = "{server.url}"\n'
    )
    connector = aiohttp.TCPConnector(force_close=True)  # the kernel chooses a process each time
    async with serving(p, d), aiohttp.ClientSession(connector=connector) as http:
        file.write_text(file.read_text() % (p.port, d.port))
        async with router("--config", str(file)) as both:
            url = await both.url()
            await both.url()
            port = Client(url, http)
            processes = [Client(f"http://127.0.0.1:{first + i}", http) for i in range(2)]
            for number in range(12):
                assert (await port.chat(f"hello {number}")).status == 200
            for process in processes:
                for number in range(12):
                    await continues(process, f"hello {number}")
            for number in range(12):
                reply = await port.chat(f"hello {number}", "www", "and")
                assert reply.route == ("local", "policy_full")
            served = [
                await one.metric(
                    "ppd_finished_total", endpoint="/v1/chat/completions", outcome="ok"
                )
                for one in processes
            ]
            assert sum(served) == 24
            assert min(served) > 0


def test_processes_that_share_divide_neither_sessions_nor_budget() -> None:
    config = RouterConfig(
        prefill=("http://p:1",), decode=("http://d:1",), processes=4, admin_port=1,
        session_capacity=100, append_budget_tokens=1000, responses_max_bytes=400,
    )  # fmt: skip
    alone = share_of(config, 0, count=4, first_port=1)
    assert (alone.session_capacity, alone.append_budget_tokens) == (25, 250)
    sharing = RouterConfig(
        prefill=("http://p:1",), decode=("http://d:1",), processes=4, admin_port=1,
        session_capacity=100, append_budget_tokens=1000, responses_max_bytes=400,
        shared=SharedConfig("redis://host"),
    )  # fmt: skip
    one = share_of(sharing, 0, count=4, first_port=1)
    assert (one.session_capacity, one.append_budget_tokens) == (100, 1000)
    assert one.responses_max_bytes == 100
