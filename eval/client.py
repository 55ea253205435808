"""The load generator: whole conversations, open loop, against one URL.

Conversations arrive when their plan says, however slow the server is; inside a conversation
a turn follows the reply before it after its think time. Prompts are token ids of exact length
on ``/generate``; each turn sends the whole history, as chat clients do. No connection cap, so
nothing waits here but for a connection to be made, which a user would wait for, too: it is in
TTFT.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from .samples import Failure, Sample, gap_bucket, gaps_of
from .traffic.conversations import Conversation

_LINE_BYTES = 1 << 23  # an event has all ids of the reply so far
_KEEP_ALIVE_S = 2.0  # less than servers': one that closes first would look like a drop
_UNIQUE_TOKENS = 16  # a conversation's first: what comes from the pool may come twice
_POOL_TOKENS = 1 << 16
_COUNT = b'"completion_tokens":'
_DONE = b"data: [DONE]"


async def hold(
    url: str,
    conversations: Sequence[Conversation],
    *,
    seed: str,
    vocabulary: range,
    silence_s: float = 120.0,
    timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
    ended: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Hold all ``conversations``; a row for each turn that was sent.

    Args:
        seed: of the prompts' content. Not one that the same router has seen: it would take them
            for conversations it knows.
        vocabulary: token ids to make prompts of.
        silence_s: of a turn without any event, before it is given up.
        timeout_s: of a turn from its send to its end.
        ended: is told of every turn as it ends.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_read=silence_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=timeout,
        headers=headers,
        read_bufsize=_LINE_BYTES,
    ) as http:
        prompts = _Prompts(seed, vocabulary, conversations)
        run = _Run(http, url, time.perf_counter(), prompts, ended)
        async with asyncio.TaskGroup() as held:
            tasks = [
                held.create_task(_hold_one(run, number, one))
                for number, one in enumerate(conversations)
            ]
    return [sample for task in tasks for sample in task.result()]


class _Prompts:
    """Token ids by number of conversation and turn.

    Drawing each id as its turn is due would hold up all other conversations, so they are pieces of
    one long row; only what conversations begin with is drawn, so that none begins like another.
    """

    def __init__(self, seed: str, vocabulary: range, conversations: Sequence[Conversation]) -> None:
        longest = max((t.new_tokens for c in conversations for t in c.exchanges), default=0)
        self._seed = seed
        self._vocabulary = vocabulary
        source = random.Random(f"{seed}/pool")
        self._pool = source.choices(vocabulary, k=longest + _POOL_TOKENS)

    def source(self, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{number}")

    def first(self, source: random.Random, tokens: int, shared: int) -> list[int]:
        """
        Args:
            shared: so many are as in all conversations of the run.
        """
        shared = min(shared, tokens)
        own = min(_UNIQUE_TOKENS, tokens - shared)
        return [
            *self._pool[:shared],
            *source.choices(self._vocabulary, k=own),
            *self.later(source, tokens - shared - own),
        ]

    def later(self, source: random.Random, tokens: int) -> list[int]:
        at = source.randrange(len(self._pool) - tokens)
        return self._pool[at : at + tokens]


@dataclass(frozen=True, slots=True)
class _Run:
    http: aiohttp.ClientSession
    url: str
    start_s: float
    prompts: _Prompts
    ended: Callable[[Sample], None] | None


async def _hold_one(run: _Run, number: int, conversation: Conversation) -> list[Sample]:
    source = run.prompts.source(number)
    samples: list[Sample] = []
    history: list[int] = []
    due_s = free_s = run.start_s + conversation.starts_at_s
    for turn, exchange in enumerate(conversation.exchanges, 1):
        due_s = max(free_s + exchange.think_s, due_s + exchange.gap_s)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        if exchange.keep_tokens is not None:
            del history[exchange.keep_tokens :]
        context = len(history)
        if turn == 1:
            shared = conversation.shared_tokens
            history += run.prompts.first(source, exchange.new_tokens, shared)
        else:
            history += run.prompts.later(source, exchange.new_tokens)
        body = _body(history, exchange.output_tokens)
        sent_s = time.perf_counter()
        sample = Sample(
            conversation=number,
            turn=turn,
            sent_at_s=round(sent_s - run.start_s, 4),
            late_ms=round(1e3 * (sent_s - due_s), 2),
            context_tokens=context,
            new_tokens=exchange.new_tokens,
            output_tokens=exchange.output_tokens,
        )
        sample, reply = await _send(run, body, sample, sent_s)
        free_s = time.perf_counter()
        samples.append(replace(sample, e2e_ms=round(1e3 * (free_s - sent_s), 3)))
        if run.ended is not None:
            run.ended(samples[-1])
        if sample.error:
            break
        history += reply
    return samples


def _body(prompt: list[int], output_tokens: int) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    return orjson.dumps({"input_ids": prompt, "stream": True, "sampling_params": sampling})


@dataclass(slots=True)
class _Stream:
    """An answer's events, as they come; the last is kept, and of the others their times."""

    first_s: float = 0.0
    last_s: float = 0.0
    last: bytes = b""
    error: bytes = b""
    tokens: int = 0
    done: bool = False
    gaps: Counter[int] = field(default_factory=Counter)

    def take(self, line: bytes) -> None:
        if line.startswith(_DONE):
            self.done = True
        if not line.startswith(b"data: {"):
            return
        if line.startswith(b'data: {"error"'):
            self.error = self.error or line
            return
        self.last = line
        tokens = _tokens_so_far(line)
        if tokens is not None and tokens <= self.tokens:
            return  # brings nothing
        self.tokens = self.tokens + 1 if tokens is None else tokens
        now_s = time.perf_counter()
        if self.first_s:
            self.gaps[gap_bucket(1e3 * (now_s - self.last_s))] += 1
        self.first_s = self.first_s or now_s
        self.last_s = now_s


def _tokens_so_far(line: bytes) -> int | None:
    """Read without parsing: a reply of n tokens is n events of up to n ids."""
    at = line.rfind(_COUNT)
    if at < 0:
        return None
    at += len(_COUNT)
    end = at
    while line[end : end + 1].isdigit() or line[end : end + 1] == b" ":
        end += 1
    digits = line[at:end].strip()
    return int(digits) if digits.isdigit() else None


async def _send(run: _Run, body: bytes, sample: Sample, sent_s: float) -> tuple[Sample, list[int]]:
    """One turn and the ids of its reply."""
    stream = _Stream()
    kind = {"Content-Type": "application/json"}
    try:
        async with run.http.post(f"{run.url}/generate", data=body, headers=kind) as response:
            sample = replace(
                sample,
                route=response.headers.get("X-PPD-Route", ""),
                reason=response.headers.get("X-PPD-Reason", ""),
            )
            if response.status != 200:
                said = (await response.text(errors="replace"))[:300]
                return _failed(sample, Failure.REFUSED, f"{response.status} {said}"), []
            async for line in response.content:
                stream.take(line)
    except TimeoutError as error:
        return _failed(sample, Failure.TIMEOUT, str(error) or "no end in time"), []
    except (aiohttp.ClientError, OSError) as error:
        return _failed(sample, Failure.DROPPED, str(error) or type(error).__name__), []
    except ValueError as error:  # a line longer than any answer's
        return _failed(sample, Failure.MALFORMED, str(error)), []
    return _judged(stream, sample, sent_s)


def _judged(stream: _Stream, sample: Sample, sent_s: float) -> tuple[Sample, list[int]]:
    answer: dict[str, Any] = {}
    try:
        answer = orjson.loads((stream.error or stream.last or b"data: {}")[6:])
        ids = answer.get("output_ids") or []
        meta = answer.get("meta_info") or {}
        cached = int(meta.get("cached_tokens") or 0)
        reason = meta.get("finish_reason")
        if not all(type(one) is int for one in ids):
            raise TypeError("output_ids must be integers")
    except (orjson.JSONDecodeError, TypeError, ValueError, AttributeError) as error:
        # A stream that was cut ends in half an event.
        failure = Failure.MALFORMED if stream.done else Failure.DROPPED
        return _failed(sample, failure, f"no answer of /generate: {error}"), []
    if "error" in answer:
        return _failed(sample, Failure.ERROR, str(answer["error"])[:300]), []
    if not stream.done:
        return _failed(sample, Failure.DROPPED, f"ended after {len(ids)} tokens, no [DONE]"), []
    if len(ids) != sample.output_tokens:
        wanted = sample.output_tokens
        said = f"got {len(ids)} tokens of {wanted}: finish_reason {str(reason)[:200]}"
        return _failed(sample, Failure.SHORT, said), []
    if not stream.first_s:
        return _failed(sample, Failure.MALFORMED, "no event says that it brings a token"), []
    return replace(
        sample,
        cached_tokens=cached,
        ttft_ms=round(1e3 * (stream.first_s - sent_s), 3),
        tpot_ms=round(1e3 * (stream.last_s - stream.first_s) / max(1, len(ids) - 1), 3),
        gaps=gaps_of(stream.gaps),
    ), ids


def _failed(sample: Sample, failure: Failure, error: str) -> Sample:
    return replace(sample, failure=failure, error=error)
