"""``ppd-eval soak engine``: random traffic for a long time; afterwards nothing may be missing.

Conversations take both routes, clients hang up anywhere, and the decode worker is always short of
KV. On request it is paused, too, which drops running requests' KV. SGLang's own idle checks are on:
a worker that has leaked a token or a slot exits. Once a minute all stops. Then the pools must be
exactly full, and a witness conversation must give the ids that it gave at first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from ppd.contract import Role
from ppd.errors import PpdError

from .. import tiny_model
from ..cluster import Launcher, Process, launching, share_flags, wait_all
from ..draft_model import DraftSpec, draft_flags, ensure_pair
from ..endpoints import empty_caches, vocabulary_of
from ..generate import EventStream, generate
from ..options import Commands, cluster_options
from ..provenance import provenance
from ..raw_rows import append_whole
from ..tiny_layers import Family
from ..tiny_model import ModelSpec
from .client import plugin_state_of

_CLIENTS = 12
_PHASE_S = 60.0
_KV = "8000"  # of the decode worker: not room enough for what the clients hold
# SGLang's own switch: every 200th decode step a request is retracted although there is room.
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "200"}
_DRAFTS = {
    "eagle": DraftSpec(),
    "mtp": DraftSpec(ModelSpec(family=Family.DEEPSEEK_V3)),
}
_GROWTH = 1.10  # of a worker's memory, from its second to its last quarter


class SoakError(PpdError):
    """Something leaked, died or changed."""


@dataclass(slots=True)
class Soak:
    """One soak: its clients, and what was counted so far."""

    http: aiohttp.ClientSession
    router: Process
    workers: list[Process]
    vocabulary: range
    source: random.Random
    pauses: bool
    seen: Counter[str] = field(default_factory=Counter)
    memory_mb: dict[str, list[float]] = field(default_factory=dict)
    witness: list[list[int]] | None = None

    async def run(self, minutes: float) -> None:
        """Send random turns for some minutes; check once a minute that nothing is missing.

        Raises:
            SoakError: a worker died, its pools are not full, or the witness has changed.
        """
        ends_s = time.monotonic() + 60 * minutes
        while time.monotonic() < ends_s:
            until_s = min(ends_s, time.monotonic() + _PHASE_S)
            clients = [
                self._hold_conversations(random.Random(self.source.random()), until_s)
                for _ in range(_CLIENTS)
            ]
            disturbed = [self._disturb(until_s)] if self.pauses else []
            await asyncio.gather(*disturbed, *clients)
            await self._look()
            print(f"  {dict(self.seen)}", file=sys.stderr, flush=True)

    async def _hold_conversations(self, source: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            history = source.choices(self.vocabulary, k=source.choice((40, 200, 600)))
            for _ in range(source.randint(1, 5)):
                reply = await self._turn(history, source)
                if reply is None or time.monotonic() >= until_s:
                    break
                history += reply + source.choices(self.vocabulary, k=source.randint(1, 300))

    async def _turn(self, history: list[int], source: random.Random) -> list[int] | None:
        """The reply's ids; None if it was hung up on, or there is none."""
        sampling: dict[str, Any] = {"max_new_tokens": source.choice((1, 8, 60, 200))}
        sampling["temperature"] = source.choice((0, 1))
        sampling["ignore_eos"] = source.random() < 0.7
        body = {"input_ids": history, "sampling_params": sampling, "stream": True}
        if source.random() < 0.1:
            body["return_logprob"] = True
        patience = source.choice((None, None, None, 0, 1, 5))
        if patience is None:
            return await self._whole(body)
        async with self.http.post(f"{self.router.url}/generate", data=orjson.dumps(body)) as answer:
            self.seen["hung_up" if answer.status == 200 else "unavailable"] += 1
            async for line in answer.content:
                patience -= line.startswith(b"data: ")
                if patience <= 0:
                    answer.close()  # the connection, in mid-answer
                    break
        return None

    async def _whole(self, body: dict[str, Any]) -> list[int] | None:
        stream = EventStream()
        await generate(self.http, self.router.url, orjson.dumps(body), stream)
        route = stream.headers.get("X-PPD-Route", f"status_{stream.status}")
        if route == "status_503":  # a worker that is paused is not ready; clients come again
            self.seen["unavailable"] += 1
            await asyncio.sleep(0.5)
            return None
        if stream.error or not stream.last:
            self.seen[f"failed_{route}"] += 1
            problem = stream.error or stream.refusal.encode()
            print(f"  failed: {route} {problem[:300]!r}", file=sys.stderr, flush=True)
            return None
        self.seen[route] += 1
        return stream.answer().ids

    async def _disturb(self, until_s: float) -> None:
        """Pause the decode worker now and then, as weight updates do.

        Not by default: SGLang 0.5.21 may lose a transferred request then (docs/LOG.md).
        """
        decode = self.workers[1].url
        while (left_s := until_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self.source.uniform(2.0, 8.0)))
            async with self.http.post(f"{decode}/pause_generation", json={"mode": "retract"}):
                pass
            async with self.http.post(f"{decode}/continue_generation", json={}):
                self.seen["pauses"] += 1

    async def _look(self) -> None:
        """Nothing may be left when nothing is under way."""
        for worker in self.workers:
            if worker.popen.poll() is not None:
                raise SoakError(f"{worker.name} {worker.ending()}")
        urls = [worker.url for worker in self.workers]
        await asyncio.wait_for(empty_caches(self.http, urls), 120.0)
        for worker in self.workers:
            used = (await plugin_state_of(self.http, worker.url))["kv_used_tokens"]
            if used:
                raise SoakError(f"{worker.name}: {used} tokens of KV are held by no request")
            process = psutil.Process(worker.popen.pid)
            family = [process, *process.children(recursive=True)]
            megabytes = sum(p.memory_info().rss for p in family) / 2**20
            self.memory_mb.setdefault(worker.name, []).append(round(megabytes, 1))
        await self._ask_witness()
        await asyncio.wait_for(empty_caches(self.http, urls), 120.0)

    async def _ask_witness(self) -> None:
        source = random.Random(1)
        history = source.choices(self.vocabulary, k=400)
        replies: list[list[int]] = []
        for _ in range(4):
            sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": history, "sampling_params": sampling, "stream": True}
            reply = await self._whole(body) or await self._whole(body)
            if reply is None:
                raise SoakError("the witness got no answer, twice")
            replies.append(reply)
            history = history + reply + source.choices(self.vocabulary, k=50)
        self.witness = self.witness or replies
        if replies != self.witness:
            raise SoakError("the witness conversation has other ids than at first")


def _start(
    launch: Launcher, model: str | Path, flags: Sequence[str]
) -> tuple[Process, list[Process]]:
    launch.environment |= {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
    prefill = launch.worker(Role.PREFILL, model, *flags, *share_flags(0, 2))
    launch.environment |= _RETRACT
    decode = launch.worker(
        Role.DECODE,
        model,
        *flags,
        *("--max-total-tokens", _KV, "--chunked-prefill-size", "256"),
        *("--num-reserved-decode-tokens", "16"),  # so that decodes do run out of KV
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        *share_flags(1, 2),
    )
    for name in _RETRACT:
        del launch.environment[name]
    wait_all([prefill, decode])
    router = launch.router([prefill], [decode], "--policy", "partial:0.8")
    wait_all([router])
    return router, [prefill, decode]


def add_to(commands: Commands) -> None:
    """Declare ``soak engine``."""
    parser = commands.add_parser(
        "engine",
        parents=[cluster_options()],
        help="random turns, aborts and retractions; looks for leaks",
        description=(
            "Send random turns, with hang-ups, retractions and exhaustion of KV. Then "
            "nothing may be missing."
        ),
    )
    parser.add_argument(
        "--draft",
        choices=tuple(_DRAFTS),
        help="speculate: EAGLE on a Llama shape, MTP on a DeepSeek-V3 shape; in place of --model",
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--pauses", action="store_true", help="pause the decode worker, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the result to this JSONL file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the soak; the last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a turn failed, or a worker's memory has grown.
    """
    path: str | Path = tiny_model.resolve(options.model)
    flags: Sequence[str] = ()
    if options.draft is not None:
        spec = _DRAFTS[options.draft]
        path, draft = ensure_pair(spec)
        flags = draft_flags(draft, spec.algorithm)
    minutes, seed, out = options.minutes, options.seed, options.out
    with launching(options.logs) as launch:
        router, workers = _start(launch, path, flags)
        soak, state = asyncio.run(_soak(router, workers, minutes, options.pauses, seed))
        log = workers[1].log.read_text(errors="replace")
        retracted = log.count("KV cache pool is full. Retract") + log.count("Testing retraction")
    growth = {name: _growth(sizes) for name, sizes in soak.memory_mb.items()}
    result = {
        "minutes": minutes,
        "local_prefills": state["accepted"],
        **soak.seen,
        "retractions": retracted,
        "requeued": state["requeued"],
        "refused": state["too_few_cached_tokens"] + state["evicted_while_waiting"],
        "aborted": state["aborted"],
        "memory_growth": growth,
    }
    if out is not None:
        row = {
            **result,
            "memory_mb": soak.memory_mb,
            "model": _name(Path(path)),
            "draft": options.draft,
        }
        append_whole(out, [{**row, **provenance(seed)}])
    print(json.dumps(result))
    failed = any(name.startswith("failed") for name in soak.seen)
    return int(failed or max(growth.values()) > _GROWTH)


def _name(model: Path) -> str:
    """The model's name; a target's folder has that of the pair."""
    return model.parent.name if model.name == "target" else model.name


def _growth(sizes: list[float]) -> float:
    """Memory at the end against memory after the first quarter."""
    quarter = sizes[len(sizes) // 4]
    return round(sizes[-1] / quarter, 4)


async def _soak(
    router: Process, workers: list[Process], minutes: float, pauses: bool, seed: int
) -> tuple[Soak, dict[str, Any]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        vocabulary = await vocabulary_of(http, workers[1].url)
        soak = Soak(http, router, workers, vocabulary, random.Random(seed), pauses)
        await soak.run(minutes)
        return soak, await plugin_state_of(http, workers[1].url)
