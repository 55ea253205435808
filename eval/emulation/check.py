"""``ppd-eval emulate check``: turns on emulated workers against what was predicted for them.

The predictions are computed outside the hooks, and written before the first turn is sent. A cell is
a way, a context, a link and decodes beside it. Turns go to the workers without a router between. A
repeat whose machine was too slow is measured again, by the rule of ``traces.py``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..engine.client import EngineClient, Reply, bootstrap_port_of
from ..raw_rows import Write
from .check_rows import Measured, Predicted, turn_row
from .knobs import Knobs
from .model import LETTERS
from .predictions import NEW_TOKENS, REPLY_TOKENS, Cell, Way, decode_ms, predicted_ttft_ms
from .traces import RefusedRunError, device_use, extends_of
from .workers import PREFILL_CHUNK, Emulated

CONTEXTS = (2048, 8192)
LINKS_GBPS = (25.0, 100.0)
DECODES = (0, 32)
_BESIDE_TOKENS = 1024  # of the prompts of the decodes
_BESIDE_GROWTH = 150  # the tokens that they have generated, on the average, in a group
_MAX_BESIDE = 20_000
_SETTLE_MS = 15.0  # of the device; a finished request's last step has ended by then
_MIN_SETTLE_S = 0.3  # for what the host does after a reply
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check measures.

    Attributes:
        slow_motion: the least; a short turn gets more.
        min_wall_s: of a turn, so that HTTP and handshakes are a small part of it.
        strict: whether turns are refused for which the machine was too slow.
    """

    slow_motion: float
    repeats: int
    contexts: tuple[int, ...] = CONTEXTS
    links_gbps: tuple[float, ...] = LINKS_GBPS
    decodes: tuple[int, ...] = DECODES
    min_wall_s: float = 6.0
    strict: bool = True

    def cells(self) -> Iterator[Cell]:
        """Yield all cells."""
        for group in self.groups():
            yield from self.cells_of(*group)

    def is_done(self, done: set[tuple[str, int]]) -> bool:
        """Whether all cells have all their repeats."""
        return all((cell.name, n) in done for cell in self.cells() for n in range(self.repeats))

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield decodes and context; the cells of a group have the same decodes beside them."""
        for decodes in self.decodes:
            for context in self.contexts:
                yield decodes, context

    def cells_of(self, decodes: int, context: int) -> Iterator[Cell]:
        """Yield the cells of a group, in the order of their turns."""
        for gbps in self.links_gbps:
            for way in Way:
                yield Cell(way, context, gbps, decodes)


class Checker:
    """Sends the turns of a check to one prefill and one decode worker, ``p0`` and ``d0``."""

    def __init__(
        self, emulated: Emulated, plan: Plan, http: aiohttp.ClientSession, bootstrap_port: int
    ) -> None:
        self._emulated = emulated
        self._plan = plan
        self._source = random.Random(0)
        prefill, decode = emulated.workers["p0"], emulated.workers["d0"]
        self._client = EngineClient(http, prefill.url, decode.url, bootstrap_port, self._source)
        self._step_ms = 0.0
        self._last_slow_motion = 1.0
        self.dropped = 0

    def predict(self, cell: Cell) -> Predicted:
        """Return what a cell should show."""
        profile = self._emulated.profile
        ttft_ms = predicted_ttft_ms(profile, cell, PREFILL_CHUNK, _BESIDE_TOKENS + _BESIDE_GROWTH)
        slow_motion = max(self._plan.slow_motion, round(1e3 * self._plan.min_wall_s / ttft_ms))
        return Predicted(
            cell,
            ttft_ms,
            cell.moved_tokens * profile.kv_bytes_per_token,
            _reported(cell),
            slow_motion,
        )

    async def group(self, decodes: int, context: int) -> AsyncIterator[tuple[Predicted, Measured]]:
        """Measure each cell of a group once."""
        profile = self._emulated.profile
        self._emulated.knobs.set(Knobs())
        await self._client.remote(self._tokens(_BESIDE_TOKENS), 1)  # the first turn takes longer
        async with self._decoding(decodes) as beside:
            self._step_ms = (
                decode_ms(profile, decodes, _BESIDE_TOKENS + _BESIDE_GROWTH) if decodes else 0.0
            )
            history: list[int] = []
            for cell in self._plan.cells_of(decodes, context):
                predicted = self.predict(cell)
                if cell.way is Way.TURN1:
                    history = self._tokens(cell.prompt_tokens)
                    measured, reply = await self._again(predicted, history, beside)
                    history = history + reply.ids
                else:
                    prompt = history + self._tokens(NEW_TOKENS)
                    measured, _ = await self._again(predicted, prompt, beside)
                yield predicted, measured

    @asynccontextmanager
    async def _decoding(self, decodes: int) -> AsyncIterator[Sequence[Reply]]:
        """Have sequences decode; their prompts are prefilled without slow motion."""
        self._emulated.knobs.set(Knobs())
        prompts = [self._tokens(_BESIDE_TOKENS) for _ in range(decodes)]
        async with self._client.decoding(prompts, _MAX_BESIDE) as beside:
            self._emulated.knobs.set(Knobs(self._plan.slow_motion))
            yield beside

    async def _again(
        self, predicted: Predicted, prompt: list[int], beside: Sequence[Reply]
    ) -> tuple[Measured, Reply]:
        """Measure a turn; again, if the machine was too slow.

        Raises:
            RefusedRunError: it was too slow each time.
        """
        # A repetition must not find what the one before has left, so its new tokens differ.
        for tried in range(_TRIES):
            try:
                return await self._turn(predicted, prompt, beside)
            except RefusedRunError as refused:
                self.dropped += 1
                print(f"  dropped: {predicted.cell.name}: {refused}", file=sys.stderr, flush=True)
                if tried + 1 == _TRIES:
                    raise
                fresh = prompt if predicted.cell.way is Way.TURN1 else prompt[-NEW_TOKENS:]
                prompt = prompt[: len(prompt) - len(fresh)] + self._tokens(len(fresh))
        raise AssertionError("unreachable")

    async def _turn(
        self, predicted: Predicted, prompt: list[int], beside: Sequence[Reply]
    ) -> tuple[Measured, Reply]:
        cell, knobs = predicted.cell, self._emulated.knobs
        slow_motion = predicted.slow_motion
        knobs.set(Knobs(slow_motion, cell.link_gbps))
        if beside:
            await _middle_of_step(beside[0], self._step_ms * slow_motion / 1e3)
        else:
            slowest = max(slow_motion, self._last_slow_motion)  # a step keeps that of its launch
            await asyncio.sleep(max(_MIN_SETTLE_S, _SETTLE_MS * slowest / 1e3))
        self._last_slow_motion = slow_motion
        before, from_s = knobs.sent_bytes("p0"), time.monotonic()
        if cell.way is Way.LOCAL:
            least = cell.context_tokens - REPLY_TOKENS
            reply = await self._client.local(prompt, REPLY_TOKENS, min_cached=least)
        else:
            whole = cell.way is Way.FULL
            reply = await self._client.remote(prompt, REPLY_TOKENS, whole=whole)
        use = device_use(self._emulated.traces, from_s, time.monotonic())
        if self._plan.strict:
            use.require_valid()
        on_decode = extends_of(self._emulated.traces, "d0", from_s)
        return (
            Measured(
                reply.ttft_ms / slow_motion,
                reply.cached_tokens,
                knobs.sent_bytes("p0") - before,
                "local" if on_decode else "remote",
                use,
            ),
            reply,
        )

    def _tokens(self, n: int) -> list[int]:
        return self._source.choices(LETTERS, k=n)


def _reported(cell: Cell) -> int:
    """The cached tokens that the engine reports: what the decode worker held, if anything.

    After a full transfer it reports those of the prefill worker.
    """
    if cell.way is Way.DELTA:
        return cell.context_tokens
    return cell.extend.cached_tokens


async def _middle_of_step(beside: Reply, step_s: float) -> None:
    """Wait for the next token of a decode, then half a step."""
    await beside.reaches(len(beside.arrived_s) + 3)  # the slow motion was changed just now
    await asyncio.sleep(step_s / 2)


@asynccontextmanager
async def checker(emulated: Emulated, plan: Plan) -> AsyncIterator[Checker]:
    """Give a checker of an emulated cluster with workers ``p0`` and ``d0``, which are ready."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        port = await bootstrap_port_of(http, emulated.workers["p0"].url)
        yield Checker(emulated, plan, http, port)


async def measure(
    emulated: Emulated,
    plan: Plan,
    done: set[tuple[str, int]],
    write: Write,
    origin: dict[str, Any],
) -> None:
    """Measure all that ``done`` lacks, and write a row for each turn.

    Args:
        done: cells and repeats that have rows already.
        origin: fields of each row.

    Raises:
        PpdError: a worker failed, or the machine was too slow.
    """
    async with checker(emulated, plan) as sends:
        for cell in plan.cells():
            if not any(name == cell.name for name, _ in done):
                write({**sends.predict(cell).row(), **origin})
        for repeat in range(plan.repeats):
            for decodes, context in plan.groups():
                names = {cell.name for cell in plan.cells_of(decodes, context)}
                if all((name, repeat) in done for name in names):
                    continue
                rows = []
                async for predicted, measured in sends.group(decodes, context):
                    rows.append({**turn_row(predicted, measured, repeat), **origin})
                    print(
                        f"  {repeat + 1}/{plan.repeats} {predicted.cell.name}: predicted "
                        f"{predicted.ttft_ms:.1f} ms, measured {measured.ttft_ms:.1f} ms",
                        *(f"at k={predicted.slow_motion:g}", measured.cached_tokens),
                        file=sys.stderr,
                        flush=True,
                    )
                for row in rows:  # a group is measured whole or again
                    write({**row, "dropped": sends.dropped})
