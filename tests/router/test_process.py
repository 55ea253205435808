"""``ppd-router`` as a process, and as several."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from eval.cluster import free_port
from eval.fake_worker.state import MODEL
from eval.fake_worker.worker import FakeWorker
from router.config.options import RouterConfig
from router.server.supervisor import share_of
from tests.waiting import HANG_S

from .conftest import CHAT_BODY, new_certificate
from .scripts import answering, gated

PPD_ROUTER = str(Path(sys.executable).with_name("ppd-router"))
CHAT = "/v1/chat/completions"


class Router:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, what: str) -> str:
        """Its log up to the line that holds ``what``."""
        seen = ""
        assert self.process.stderr is not None
        while what not in seen:
            line = await asyncio.wait_for(self.process.stderr.readline(), HANG_S)
            assert line, f"it ended: {seen}"
            seen += line.decode()
        return seen

    async def url(self) -> str:
        return (await self.says("listening on ")).split("listening on ")[1].split()[0]


@asynccontextmanager
async def router(*flags: str, command: Sequence[str] = (PPD_ROUTER,)) -> AsyncIterator[Router]:
    process = await asyncio.create_subprocess_exec(*command, *flags, stderr=asyncio.subprocess.PIPE)
    try:
        yield Router(process)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(http: aiohttp.ClientSession, url: str, **how: Any) -> int:
    async with http.post(url + CHAT, json=CHAT_BODY, **how) as answer:
        await answer.read()
        return answer.status


async def get(http: aiohttp.ClientSession, url: str) -> bytes:
    async with http.get(url) as answer:
        return await answer.read()


async def test_it_serves_and_stops_on_sigterm() -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    flags = ("--port", "0", "--policy", "pd")
    async with p.serving(), d.serving():
        workers = ("--prefill", p.url, "--decode", d.url)
        async with router(*workers, *flags) as one, aiohttp.ClientSession() as http:
            assert await ask(http, await one.url()) == 200


async def test_while_it_waits_for_given_workers_it_is_alive_and_ends_on_sigterm() -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    port = free_port()
    flags = ("--port", str(port), "--policy", "pd")
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        d.probes_hang = True
        workers = ("--prefill", p.url, "--decode", d.url)
        one = await asyncio.create_subprocess_exec(PPD_ROUTER, *workers, *flags)
        await asyncio.wait_for(d.probed.wait(), HANG_S)
        for path, status in (("/live", 200), ("/health", 503)):
            async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status == status
        one.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.wait(), HANG_S) == 128 + signal.SIGTERM


async def test_sighup_takes_up_what_can_be_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        fixed = f'prefill = ["{p.url}"]\ndecode = ["{d.url}"]\nlog_format = "json"\n'
        file.write_text(fixed + 'policy = "pd"\n')
        async with router("--config", str(file), "--port", "0") as one:
            url = (await one.url()).rstrip('"},')
            assert await ask(http, url) == 200
            key = "4" * 64
            changed = 'policy = "full"\nsession_capacity = 7\n[tenants.t]\nkeys = ["%s"]\n'
            file.write_text(fixed + changed % key)
            one.process.send_signal(signal.SIGHUP)
            output = await one.says("only a restart takes up")
            lines = [orjson.loads(line) for line in output.splitlines()]
            assert lines[-1]["message"].endswith(": session_capacity")
            assert lines[-2]["message"] == "configuration reloaded: policy, tenants"
            assert await ask(http, url) == 401  # from now on with a key
            file.write_text(fixed + changed % "no digest")
            one.process.send_signal(signal.SIGHUP)
            assert "64 hexadecimal digits" in await one.says("configuration not reloaded")
            assert await ask(http, url) == 401
            shown = orjson.loads(await get(http, f"{url}/table"))
            assert shown["policy"] == "full"


async def test_sighup_takes_a_measured_table_out_of_use(tmp_path: Path, table: Path) -> None:
    file = tmp_path / "router.toml"
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        fixed = f'prefill = ["{p.url}"]\ndecode = ["{d.url}"]\ntable = "{table}"\n'
        file.write_text(fixed)
        async with router("--config", str(file), "--port", "0") as one:
            url = await one.url()
            assert orjson.loads(await get(http, f"{url}/table"))["policy"] == "ppd"
            file.write_text(fixed + 'policy = "pd"\n')
            one.process.send_signal(signal.SIGHUP)
            log = await one.says("configuration reloaded: policy")
            assert f"policy pd uses no table: {table} is not read" in log
            assert orjson.loads(await get(http, f"{url}/table"))["policy"] == "pd"


def two_free_ports() -> int:
    """The first of two ports in a row."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_processes_share_what_responses_may_take() -> None:
    config = RouterConfig(
        prefill=("http://p:1",),
        decode=("http://d:1",),
        processes=2,
        admin_port=1,
        responses_max_bytes=1001,
    )
    assert share_of(config, 0, count=2, first_port=1).responses_max_bytes == 501


async def served(http: aiohttp.ClientSession, admin: str) -> float:
    for line in (await get(http, f"{admin}/metrics")).decode().splitlines():
        if line.startswith("ppd_finished_total{") and 'outcome="ok"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


async def test_two_processes_share_a_port_and_what_operators_say(tmp_path: Path) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    first = two_free_ports()
    admins = [f"http://127.0.0.1:{first + i}" for i in range(2)]
    file = tmp_path / "router.toml"
    file.write_text(f"admin_port = {first}\nprocesses = 2\n")
    flags = ("--config", str(file), "--port", "0", "--policy", "pd")
    async with p.serving(), d.serving():
        workers = ("--prefill", p.url, "--decode", d.url)
        async with router(*workers, *flags) as both, aiohttp.ClientSession() as http:
            url = await both.url()
            assert await both.url() == url
            close = {"Connection": "close"}  # another connection each time
            for _ in range(60):
                assert await ask(http, url, headers=close) == 200
            counts = [await served(http, admin) for admin in admins]
            assert sum(counts) == 60
            assert min(counts) > 0
            worker = d.url.removeprefix("http://")
            async with http.post(f"{admins[1]}/workers/{worker}/drain") as answer:
                assert answer.status == 200
            for _ in range(10):
                assert await ask(http, url, headers=close) == 503
            async with http.post(f"{admins[0]}/workers/{worker}/resume") as answer:
                assert answer.status == 200
            # One of them is killed: it is started again, and the other serves on.
            (child, *_) = children(both.process.pid)
            os.kill(child, signal.SIGKILL)
            assert "ended with -9: started again" in await both.says("listening on")
            for _ in range(20):
                assert await ask(http, url, headers=close) == 200


async def test_what_operators_say_and_see_is_all_processes(tmp_path: Path) -> None:
    gate = asyncio.Event()
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", gated(gate))
    late, gone = FakeWorker("decode", answering()), FakeWorker("decode", answering())
    first = two_free_ports()
    admins = [f"http://127.0.0.1:{first + i}" for i in range(2)]
    file = tmp_path / "router.toml"
    file.write_text(f"admin_port = {first}\nprocesses = 2\nstartup_timeout_s = 5\n")
    flags = ("--config", str(file), "--port", "0", "--policy", "pd")
    async with p.serving(), d.serving(), late.serving(), AsyncExitStack() as going:
        await going.enter_async_context(gone.serving())
        workers = ("--prefill", p.url, "--decode", d.url, gone.url)
        async with router(*workers, *flags) as both, aiohttp.ClientSession() as http:

            async def operate(method: str, admin: str, path: str, **body: str) -> dict[str, Any]:
                async with http.request(method, f"{admin}/workers{path}", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    fields: dict[str, Any] = await answer.json()
                    return fields

            async def shown(admin: str) -> dict[str, dict[str, Any]]:
                listed = orjson.loads(await get(http, f"{admin}/workers"))
                return {worker["url"]: worker for worker in listed}

            url = await both.url()
            assert await both.url() == url
            await operate("DELETE", admins[0], f"/{gone.url.removeprefix('http://')}")
            await going.aclose()
            body, close = {**CHAT_BODY, "stream": True}, {"Connection": "close"}
            asked = [
                asyncio.create_task(http.post(url + CHAT, json=body, headers=close))
                for _ in range(20)
            ]
            streams = await asyncio.gather(*asked)
            own = [await in_flight(http, admin, d.url) for admin in admins]
            assert (sum(own), min(own) > 0) == (20, True)
            for admin in admins:
                assert (await shown(admin))[d.url]["in_flight"] == 20
            one = f"/{d.url.removeprefix('http://')}"
            assert (await operate("POST", admins[1], f"{one}/drain"))["in_flight"] == 20
            gate.set()
            for stream in streams:
                await stream.read()
            while (await shown(admins[0]))[d.url]["in_flight"]:
                pass
            await operate("PUT", admins[0], "", url=late.url, role="decode")
            # One of them is killed: it takes over from the other what operators have said.
            (child, *_) = children(both.process.pid)
            os.kill(child, signal.SIGKILL)
            decided = []
            for admin in admins:
                with suppress(aiohttp.ClientConnectionError):  # of the killed one
                    async with http.post(f"{admin}/decide", json={"turn": None}) as answer:
                        decided.append(answer.status)
            assert set(decided) == {200}, "a decision asks no other process"
            await both.says("started again")
            await both.url()
            for admin in admins:
                known = await shown(admin)
                assert known.keys() == {p.url, d.url, late.url}
                assert [one for one in known if known[one]["draining"]] == [d.url]
            await operate("POST", admins[0], f"{one}/resume")
            assert not any([(await shown(admin))[d.url]["draining"] for admin in admins])


async def test_a_restarted_process_has_the_configuration_of_the_others(tmp_path: Path) -> None:
    first, file = two_free_ports(), tmp_path / "router.toml"
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        fixed = f'prefill = ["{p.url}"]\ndecode = ["{d.url}"]\nadmin_port = {first}\n'
        file.write_text(fixed + 'processes = 2\npolicy = "pd"\n')
        async with router("--config", str(file), "--port", "0") as both:
            url = await both.url()
            await both.url()
            assert await ask(http, url) == 200
            changed = 'processes = 2\npolicy = "full"\n[tenants.t]\nkeys = ["%s"]\n' % ("4" * 64)
            file.write_text(fixed + changed)
            both.process.send_signal(signal.SIGHUP)
            for _ in range(2):
                await both.says("configuration reloaded: policy, tenants")
            file.write_text("half of an edit = [")
            both.process.send_signal(signal.SIGHUP)
            await both.says("a process that starts again is not reloaded")
            (child, *_) = children(both.process.pid)
            os.kill(child, signal.SIGKILL)
            await both.says("started again")
            await both.url()
            for admin in range(2):
                shown = orjson.loads(await get(http, f"http://127.0.0.1:{first + admin}/table"))
                assert shown["policy"] == "full"
            close = {"Connection": "close"}
            assert {await ask(http, url, headers=close) for _ in range(20)} == {401}


async def test_a_signal_during_a_start_is_not_lost(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        fixed = f'prefill = ["{p.url}"]\ndecode = ["{d.url}"]\n'
        fixed += "control_timeout_s = 0.5\n"
        file.write_text(fixed + 'policy = "pd"\n')
        d.probes_hang = True
        async with router("--config", str(file), "--port", "0") as one:
            await asyncio.wait_for(d.probed.wait(), HANG_S)
            file.write_text(fixed + 'policy = "full"\n')
            one.process.send_signal(signal.SIGHUP)
            d.probes_hang = False
            url = await one.url()
            await one.says("configuration reloaded: policy")
            assert orjson.loads(await get(http, f"{url}/table"))["policy"] == "full"


def over_https(file: Path, certificate: tuple[Path, Path]) -> tuple[list[str], tuple[str, ...]]:
    """Write the file of two processes; gives their operators' URLs, and the flags."""
    first = two_free_ports()
    file.write_text(
        f'admin_port = {first}\nprocesses = 2\nadmin_host = "127.0.0.2"\n'
        f'tls_certificate = "{certificate[0]}"\ntls_key = "{certificate[1]}"\n'
    )
    flags = ("--config", str(file), "--port", "0", "--policy", "pd")
    return [f"https://127.0.0.2:{first + i}" for i in range(2)], flags


async def test_processes_speak_https_among_themselves_where_clients_do(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    admins, flags = over_https(tmp_path / "router.toml", certificate)
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    trusted.check_hostname = False
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with p.serving(), d.serving():
        workers = ("--prefill", p.url, "--decode", d.url)
        session = aiohttp.ClientSession(connector=connector)
        async with router(*workers, *flags) as both, session as http:
            assert (await both.url()).startswith("https://")
            await both.url()
            drain = f"{admins[1]}/workers/{d.url.removeprefix('http://')}/drain"
            async with http.post(drain) as answer:
                assert answer.status == 200, await answer.text()
            for admin in admins:
                shown = orjson.loads(await get(http, f"{admin}/workers"))
                assert [one["draining"] for one in shown] == [False, True]


async def test_a_process_that_starts_with_a_renewed_certificate_trusts_the_others(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """It takes the operators' changes from processes that still have the one before."""
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    admins, flags = over_https(tmp_path / "router.toml", certificate)
    async with p.serving(), d.serving(), aiohttp.ClientSession() as http:
        workers = ("--prefill", p.url, "--decode", d.url)
        async with router(*workers, *flags) as both:
            for _ in range(2):
                await both.url()
            drain = f"{admins[1]}/workers/{d.url.removeprefix('http://')}/drain"
            async with http.post(drain, ssl=False) as answer:
                assert answer.status == 200, await answer.text()
            new_certificate(*certificate)
            (child, *_) = children(both.process.pid)
            os.kill(child, signal.SIGKILL)
            await both.says("started again")
            await both.url()
            for admin in admins:
                async with http.get(f"{admin}/workers", ssl=False) as answer:
                    assert [one["draining"] for one in await answer.json()] == [False, True]


async def in_flight(http: aiohttp.ClientSession, admin: str, worker: str) -> float:
    """As that process counts it."""
    for line in (await get(http, f"{admin}/metrics")).decode().splitlines():
        if line.startswith("ppd_worker_in_flight{") and worker in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


async def test_a_response_is_continued_by_another_process(tmp_path: Path) -> None:
    p, d = FakeWorker("prefill", answering()), FakeWorker("decode", answering())
    first = two_free_ports()
    admins = [f"http://127.0.0.1:{first + i}" for i in range(2)]
    file = tmp_path / "router.toml"
    file.write_text(f"admin_port = {first}\nprocesses = 2\n")
    flags = ("--config", str(file), "--port", "0", "--policy", "pd")
    async with p.serving(), d.serving():
        workers = ("--prefill", p.url, "--decode", d.url)
        async with router(*workers, *flags) as both, aiohttp.ClientSession() as http:
            url = await both.url()
            assert await both.url() == url
            responses = f"{url}/v1/responses"

            async def respond(**more: Any) -> tuple[int, dict[str, Any]]:
                close = {"Connection": "close"}  # another connection each time
                body = {"model": MODEL, "input": "x", **more}
                async with http.post(responses, json=body, headers=close) as answer:
                    return answer.status, await answer.json()

            # Until both processes have given one, and each has gone on with the other's.
            names = set()
            for _ in range(40):
                status, last = await respond()
                assert status == 200
                names.add(last["id"].split("_")[1])
                for _ in range(4):
                    status, last = await respond(previous_response_id=last["id"])
                    assert status == 200, last
            assert names == {"0", "1"}
            assert len(d.bodies[-1]["messages"]) == 9
            # No process but these may ask for it, whoever they say they are.
            for admin in admins:
                query = {"tenant": "", "name": last["id"]}
                for headers in ({}, {"X-PPD-Sibling": "a guess"}):
                    kept = f"{admin}/kept-responses"
                    async with http.get(kept, params=query, headers=headers) as answer:
                        assert answer.status == 401
            for _ in range(8):
                one = f"{responses}/{last['id']}"
                async with http.get(one, headers={"Connection": "close"}) as answer:
                    assert await answer.json() == last
            async with http.delete(f"{responses}/{last['id']}") as answer:
                assert (await answer.json())["deleted"]
            status, fields = await respond(previous_response_id=last["id"])
            assert (status, fields["error"]["code"]) == (404, "previous_response_not_found")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_several_processes_that_cannot_start_end_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        f"admin_port = {two_free_ports()}\nprocesses = 2\nstartup_timeout_s = 0.2\n"
        'prefill = ["http://127.0.0.1:1"]\ndecode = ["http://127.0.0.1:2"]\n'
    )
    process = await asyncio.create_subprocess_exec(
        *(PPD_ROUTER, "--config", str(file), "--port", "0"), stderr=asyncio.subprocess.PIPE
    )
    _, output = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode not in (0, None)
    assert b"does not answer" in output
