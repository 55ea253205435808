"""``ppd-eval soak pool``: millions of searches; no answer may be wrong, nothing may be lost.

Meanwhile rows come and go, indexes are swapped, and a shard is killed. There are two shards and a
front before them, as processes. Rows come in crowds, one after the other, and are random directions
within them. So a search for a row shows whether it is there: the row itself has a score of 1, and
nothing else comes near.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from ppd.errors import PpdError

from ..cluster import Launcher, Process, free_port, launching, script
from ..provenance import provenance
from ..raw_rows import append_whole

_WIDTH = 64
_ROWS = 20_000  # of each shard
_BATCH = 256
_SEARCHERS = 4  # a shard
_CROWD, _CLOSE = 3000, 1.2  # rows of each; what they have in common, against what they have not
_KINDS = 3  # of rows, that filters distinguish
_WRITTEN = 200  # rows that come, and that go, at once
_PAUSE_S = 2.0  # between two such writes
_SWAP_S, _KILL_S = 30.0, 45.0
_THERE, _GONE = 0.999, 0.95  # scores of a row that is there, and of the nearest other
_MIN_RECALL = 0.999
_GROWTH = 1.15  # of memory after a swap, from the first third to the last
_PATH = "/v1/collections/soak"
_QUERY = struct.Struct("<4sIIIIIf")
_TIMEOUT_MS = 60_000.0


class PoolSoakError(PpdError):
    """An answer was wrong, or a shard has lost something."""


def direction(number: int) -> NDArray[np.float32]:
    """The row of that number."""
    crowd, own = (
        np.random.default_rng(seed).normal(size=_WIDTH) for seed in ((1, number // _CROWD), number)
    )
    row = _CLOSE * crowd / np.linalg.norm(crowd) + own / np.linalg.norm(own)
    return np.asarray(row / np.linalg.norm(row), np.float32)


@dataclass(slots=True, eq=False)
class Shard:
    """One shard, and the rows that it must hold.

    Attributes:
        live: numbers of rows that are there; dead: of some that are not any more.
        unsure: of rows whose writing was not answered.
        found: numbers of rows, by the keys they were found under.
        up: it takes requests.
        life: counts how often it was killed: a request of another one may get no answer.
    """

    process: Process
    argv: list[str]
    live: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    dead: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    found: dict[int, int] = field(default_factory=dict)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    life: int = 0

    @property
    def url(self) -> str:
        """The base URL of the shard."""
        return self.process.url


@dataclass(slots=True, eq=False)
class Soak:
    """One soak: its shards, and what was counted so far."""

    http: aiohttp.ClientSession
    launch: Launcher
    shards: list[Shard]
    front: Process
    source: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    memory_mb: list[float] = field(default_factory=list)
    next_number: int = 0

    async def run(self, searches: int) -> None:
        """Search, write, swap and kill until so many searches are answered.

        Raises:
            PoolSoakError: something was wrong.
        """
        for shard in self.shards:
            await self._fill(shard)
        workers = [self._search(shard) for shard in self.shards for _ in range(_SEARCHERS)]
        workers += [self._write(shard) for shard in self.shards]
        workers += [self._ask_front(), self._ask_front(), self._swap(), self._kill(self.shards[1])]
        tasks = [asyncio.ensure_future(worker) for worker in workers]
        try:
            while self.seen["searches"] < searches:
                done, _ = await asyncio.wait(tasks, timeout=10.0)
                for task in done:
                    task.result()  # they end by failing only
                print(f"  {dict(self.seen)}", file=sys.stderr, flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for shard in self.shards:
            await self._count(shard)

    async def _fill(self, shard: Shard) -> None:
        await self._post("PUT", f"{shard.url}{_PATH}", {"dimensions": _WIDTH})
        for _ in range(_ROWS // 1000):
            await self._add(shard, 1000)
        shard.up.set()

    async def _search(self, shard: Shard) -> None:
        """For rows that are there, and for some that are not."""
        while True:
            await shard.up.wait()
            life = shard.life
            there = self.source.sample(list(shard.live), _BATCH - 16)
            gone = self.source.sample(list(shard.dead), min(16, len(shard.dead)))
            rows = [shard.live[one] for one in there] + [shard.dead[one] for one in gone]
            head = (b"PPDQ", len(rows), _WIDTH, 1, 0, self.source.randrange(2), _TIMEOUT_MS)
            body = _QUERY.pack(*head) + np.stack(rows).tobytes()
            kind = {"Content-Type": "application/octet-stream"}
            try:
                async with self.http.post(
                    f"{shard.url}{_PATH}/search", data=body, headers=kind
                ) as response:
                    raw = await response.read()
            except aiohttp.ClientError:
                if shard.life == life:
                    raise
                continue
            if response.status != 200:
                raise PoolSoakError(f"a search: {response.status} {raw[:200]!r}")
            keys = np.frombuffer(raw, np.int64, len(rows), 12)
            scores = np.frombuffer(raw, np.float32, len(rows), 12 + 8 * len(rows))
            self.seen["searches"] += len(rows)
            for number, key, score in zip(there, keys.tolist(), scores.tolist(), strict=False):
                if score >= _THERE and shard.found.setdefault(key, number) != number:
                    raise PoolSoakError(f"key {key} is of {shard.found[key]}, and of {number}")
                if number in shard.live:  # not taken away meanwhile
                    self.seen["sought"] += 1
                    self.seen["missed"] += score < _THERE
            if gone and (highest := float(scores[len(there) :].max())) > _GONE:
                raise PoolSoakError(f"a row that was deleted is found: score {highest}")

    async def _write(self, shard: Shard) -> None:
        """Rows come, as many go, some change."""
        while True:
            await shard.up.wait()
            life = shard.life
            try:
                await self._add(shard, _WRITTEN)
                await self._take_away(shard, _WRITTEN)
            except aiohttp.ClientError:
                if shard.life == life:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _add(self, shard: Shard, count: int) -> None:
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        rows = {number: direction(number) for number in numbers}
        shard.unsure.update(numbers)
        points = [
            {
                "id": f"r{number}",
                "vector": row.tolist(),
                "text": f"row {number}",
                "metadata": {"kind": number % _KINDS},
            }
            for number, row in rows.items()
        ]
        await self._post("POST", f"{shard.url}{_PATH}/points", {"points": points})
        shard.unsure.difference_update(numbers)
        shard.live.update(rows)
        self.seen["added"] += count

    async def _take_away(self, shard: Shard, count: int) -> None:
        numbers = self.source.sample(list(shard.live), count)
        rows = {number: shard.live.pop(number) for number in numbers}
        shard.unsure.update(numbers)
        ids = [f"r{number}" for number in numbers]
        await self._post("POST", f"{shard.url}{_PATH}/delete", {"ids": ids})
        shard.unsure.difference_update(numbers)
        shard.dead = dict([*shard.dead.items(), *rows.items()][-2000:])
        self.seen["deleted"] += count

    async def _ask_front(self) -> None:
        """Rows of both shards; what it gives of a shard that is up must be right."""
        while True:
            shard = self.source.choice(self.shards)
            number = self.source.choice(list(shard.live))
            body = {"vector": shard.live[number].tolist(), "limit": 3, "timeout_ms": _TIMEOUT_MS}
            kind = number % _KINDS if self.source.random() < 0.5 else None
            if kind is not None:
                body["filter"] = {"kind": kind}
                self.seen["filtered"] += 1
            answer = await self._post("POST", f"{self.front.url}{_PATH}/search", body)
            self.seen["front"] += 1
            self.seen["partial"] += answer["partial"]
            if answer["partial"] and answer["missing"] != ["shard1"]:
                raise PoolSoakError(f"missing: {answer['missing']}, only shard1 was killed")
            hits = answer["results"][0]["hits"]
            if any(hit["text"] != f"row {hit['id'][1:]}" for hit in hits):
                raise PoolSoakError(f"texts of other rows: {hits}")
            if kind is not None and any(int(hit["id"][1:]) % _KINDS != kind for hit in hits):
                raise PoolSoakError(f"rows that do not pass the filter: {hits}")
            if number in shard.live and not answer["partial"]:
                self.seen["sought"] += 1
                self.seen["missed"] += not hits or hits[0]["id"] != f"r{number}"

    async def _swap(self) -> None:
        """Both shards get new indexes; memory is watched of the one that is not killed."""
        steady, killed = self.shards
        while True:
            await asyncio.sleep(_SWAP_S)
            await self._post("POST", f"{steady.url}{_PATH}/rebuild", {})
            self.seen["swaps"] += 1
            process = psutil.Process(steady.process.popen.pid)
            self.memory_mb.append(round(process.memory_info().rss / 2**20, 1))
            await killed.up.wait()
            life = killed.life
            try:
                await self._post("POST", f"{killed.url}{_PATH}/rebuild", {})
                self.seen["swaps"] += 1
            except aiohttp.ClientError:
                if killed.life == life:
                    raise
                self.seen["swaps_cut"] += 1

    async def _kill(self, shard: Shard) -> None:
        """Kill a shard at once, and start it again: it must have all that it had acknowledged."""
        while True:
            await asyncio.sleep(_KILL_S)
            shard.up.clear()
            shard.life += 1
            shard.process.popen.send_signal(signal.SIGKILL)
            await asyncio.to_thread(shard.process.popen.wait)
            self.seen["kills"] += 1
            await asyncio.sleep(2.0)  # in which the front has to do without
            port = int(shard.url.rsplit(":", 1)[1])
            shard.process = self.launch.start("shard", port, shard.argv)
            await asyncio.to_thread(shard.process.wait_ready, "/health", time.monotonic() + 60.0)
            await self._count(shard)
            shard.up.set()

    async def _count(self, shard: Shard) -> None:
        async with self.http.get(f"{shard.url}{_PATH}") as response:
            rows = (await response.json())["rows"]
        if not len(shard.live) <= rows <= len(shard.live) + len(shard.unsure):
            raise PoolSoakError(
                f"{shard.url} has {rows} rows; {len(shard.live)} were written to it, of "
                f"{len(shard.unsure)} more it is not known"
            )

    async def _post(self, method: str, url: str, body: Any) -> Any:
        data, kind = orjson.dumps(body), {"Content-Type": "application/json"}
        async with self.http.request(method, url, data=data, headers=kind) as response:
            raw = await response.read()
        if response.status not in (200, 201):
            raise PoolSoakError(f"{method} {url}: {response.status} {raw[:200]!r}")
        return orjson.loads(raw)


def run(searches: int, seed: int, out: Path | None, logs: Path) -> int:
    """Run the soak; the last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if recall is too low, or memory has grown.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, launching(logs) as launch:
        soak = asyncio.run(_soak(launch, Path(folder), searches, seed))
    took_s = round(time.monotonic() - began_s)
    third = max(1, len(soak.memory_mb) // 3)
    # A run that ends before the first swap shows nothing of memory.
    first, last = (
        max(some, default=1.0) for some in (soak.memory_mb[:third], soak.memory_mb[-third:])
    )
    recall = 1 - soak.seen["missed"] / soak.seen["sought"]
    growth = last / first
    summary = {**soak.seen, "recall": round(recall, 6), "memory_growth": round(growth, 4)}
    if out is not None:
        row = {**summary, "memory_mb": soak.memory_mb, "rows": _ROWS, "width": _WIDTH}
        row["seconds"] = took_s
        append_whole(out, [{**row, **provenance(seed)}])
    print(json.dumps(summary))
    return int(recall < _MIN_RECALL or growth > _GROWTH)


async def _soak(launch: Launcher, folder: Path, searches: int, seed: int) -> Soak:
    command = script("ppd-pool")
    shards = []
    for i in range(2):
        data, port = folder / f"shard{i}", free_port()
        data.mkdir()
        argv = [command, "serve", "--data", str(data), "--port", str(port), "--threads", "1"]
        shards.append(Shard(launch.start("shard", port, argv), argv))
    port = free_port()
    settings = folder / "front.toml"
    urls = [[shard.url] for shard in shards]
    settings.write_text(f"shards = {json.dumps(urls)}\nport = {port}\nshard_slack_s = 60.0\n")
    front = launch.start("front", port, [command, "serve", "--config", str(settings)])
    for process in (*(shard.process for shard in shards), front):
        await asyncio.to_thread(process.wait_ready, "/health", time.monotonic() + 120.0)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        soak = Soak(http, launch, shards, front, random.Random(seed))
        await soak.run(searches)
        return soak
