"""One of three router processes is killed under load."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from eval.fake_worker.worker import FakeWorker
from eval.store_server import StoreServer

from ..conftest import Client
from ..fixtures import chat, serving, until
from ..scripts import answering
from ..test_process import PPD_ROUTER, Router

CONVERSATIONS, TURNS = 24, 12
KILLED_AFTER = CONVERSATIONS * TURNS // 3


@dataclass
class Load:
    """Conversations whose turns go to one replica after the other, as behind a load balancer."""

    replicas: list[Client]
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    third: asyncio.Event = field(default_factory=asyncio.Event)
    done: int = 0
    lost: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)

    async def converse(self, number: int) -> list[str]:
        said = [f"hello {number}"]
        for turn in range(TURNS):
            await self.turn(number + turn, said)
            said += ["www", f"and {turn}"]
            self.done += 1
            if self.done == KILLED_AFTER:
                self.third.set()
        return said

    async def turn(self, first: int, said: list[str]) -> None:
        for attempt in range(len(self.replicas) + 1):
            replica = self.replicas[(first + attempt) % len(self.replicas)]
            begun_before = not self.killed.is_set()
            try:
                reply = await replica.chat(*said)
            except aiohttp.ClientConnectorError:  # it never got the request: the next one does
                self.refused += 1
            except aiohttp.ClientError as error:
                if replica is not self.replicas[0] or not begun_before:
                    self.failed.append(repr(error))
                self.lost += 1
            else:
                if reply.status != 200:
                    self.failed.append(f"{reply.status} {reply.body!r}")
                return
        self.failed.append("no replica has served it")


async def test_a_killed_replica_costs_no_request_that_had_not_begun(
    server: StoreServer, tmp_path: Path
) -> None:
    prefill = FakeWorker("prefill", answering())
    decode = [FakeWorker("decode", answering(cached=96)) for _ in range(2)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(prefill, *decode))
        file = tmp_path / "router.toml"
        file.write_text(
            f'policy = "full"\nport = 0\nprefill = ["{prefill.url}"]\n'
            f"decode = {[one.url for one in decode]}\n"
            f'[shared]\nurl = "{server.url}"\n'.replace("'", '"')
        )
        # Each request has a connection of its own: one that is refused has not begun.
        connector = aiohttp.TCPConnector(force_close=True)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        processes = [await start(file) for _ in range(3)]
        stack.push_async_callback(stop, processes)
        replicas = [Client(await process.url(), http) for process in processes]
        load = Load(replicas)
        talking = asyncio.gather(*(load.converse(number) for number in range(CONVERSATIONS)))
        await load.third.wait()
        processes[0].process.kill()
        await processes[0].process.wait()
        load.killed.set()
        said = await talking
        assert load.failed == []
        assert load.done == CONVERSATIONS * TURNS
        assert load.refused > 0, "the load has gone on after the kill"
        assert load.lost <= CONVERSATIONS, "only what had begun there"
        for replica, other in (replicas[1:], replicas[:0:-1]):
            await other.chat("the last record of the other one")
            await continues(replica, "the last record of the other one")
            # What the killed one had not written are its last turns, not whole conversations.
            for contents in said:
                reply = await replica.chat(*contents)
                assert reply.route == ("local", "policy_full")


async def continues(replica: Client, text: str) -> None:
    """Wait until a replica has a conversation: it has all that was written before, too."""
    body = chat(text, "www", "and")

    async def holds() -> bool:
        shown = await replica.post("/explain/v1/chat/completions", body)
        return shown.json["features"] is not None

    await until(holds)


async def start(file: Path) -> Router:
    process = await asyncio.create_subprocess_exec(
        *(PPD_ROUTER, "--config", str(file)), stderr=asyncio.subprocess.PIPE
    )
    return Router(process)


async def stop(processes: list[Router]) -> None:
    for one in processes:
        if one.process.returncode is None:
            one.process.terminate()
        await one.process.wait()
