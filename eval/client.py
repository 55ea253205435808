"""The load generator: whole conversations, open loop, against one URL.

Conversations arrive when their plan demands, however slow the server is. Inside a conversation a
turn follows the reply before it after its think time. Prompts are token ids of exact length on
``/generate``. Each turn sends the whole history, as chat clients do. Connections have no cap: a
turn only waits for its connection to be made, and that is part of its TTFT.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import orjson

from .generate import EventStream, generate, greedy_body
from .samples import Failure, Sample, gap_bucket, gaps_of
from .traffic.conversations import Conversation

_LINE_BYTES = 1 << 23  # an event has all ids of the reply so far
_KEEP_ALIVE_S = 2.0  # less than servers': one that closes first would look like a drop
_UNIQUE_TOKENS = 16  # a conversation's first: what comes from the pool may come twice
_POOL_TOKENS = 1 << 16


async def hold(
    url: str,
    conversations: Sequence[Conversation],
    *,
    seed: str,
    vocabulary: range,
    silence_s: float = 120.0,
    timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
    model: str = "",
    ended: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Hold all ``conversations``; a row for each turn that was sent.

    Args:
        seed: of the prompts' content. Not one that the same router has seen: it would take them
            for conversations of its index.
        vocabulary: token ids to make prompts of.
        silence_s: of a turn without any event, before it is given up.
        timeout_s: of a turn from its send to its end.
        headers: of all requests.
        model: that the requests name; "": none.
        ended: called with every turn as it ends.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_read=silence_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=timeout,
        headers=headers,
        read_bufsize=_LINE_BYTES,
    ) as http:
        prompts = _Prompts(seed, vocabulary, conversations)
        run = _Run(http, url, model, time.perf_counter(), prompts, ended)
        async with asyncio.TaskGroup() as held:
            tasks = [
                held.create_task(_hold_one(run, number, conversation))
                for number, conversation in enumerate(conversations)
            ]
    return [sample for task in tasks for sample in task.result()]


class _Prompts:
    """Token ids by number of conversation and turn.

    Drawing each id as its turn is due would hold up all other conversations, so they are pieces of
    one long row; only what conversations begin with is drawn, so that none begins like another.
    """

    def __init__(self, seed: str, vocabulary: range, conversations: Sequence[Conversation]) -> None:
        longest = max((t.new_tokens for c in conversations for t in c.turns), default=0)
        self._seed = seed
        self._vocabulary = vocabulary
        source = random.Random(f"{seed}/pool")
        self._pool = source.choices(vocabulary, k=longest + _POOL_TOKENS)
        self._shared: dict[tuple[int, int], list[int]] = {}

    def source(self, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{number}")

    def first(self, source: random.Random, tokens: int, shared: int, prompt: int) -> list[int]:
        """Return the prompt of a conversation's first turn.

        Args:
            shared: tokens of the system prompt.
            prompt: number of the system prompt.
        """
        shared = min(shared, tokens)
        own = min(_UNIQUE_TOKENS, tokens - shared)
        return [
            *self._system(prompt, shared),
            *source.choices(self._vocabulary, k=own),
            *self.later(source, tokens - shared - own),
        ]

    def _system(self, prompt: int, tokens: int) -> list[int]:
        if prompt == 0:
            return self._pool[:tokens]
        if (prompt, tokens) not in self._shared:
            source = random.Random(f"{self._seed}/system/{prompt}")
            self._shared[prompt, tokens] = source.choices(self._vocabulary, k=tokens)
        return self._shared[prompt, tokens]

    def later(self, source: random.Random, tokens: int) -> list[int]:
        at = source.randrange(len(self._pool) - tokens)
        return self._pool[at : at + tokens]


@dataclass(frozen=True, slots=True)
class _Run:
    http: aiohttp.ClientSession
    url: str
    model: str
    start_s: float
    prompts: _Prompts
    ended: Callable[[Sample], None] | None


async def _hold_one(run: _Run, number: int, conversation: Conversation) -> list[Sample]:
    source = run.prompts.source(number)
    samples: list[Sample] = []
    history: list[int] = []
    due_s = free_s = run.start_s + conversation.starts_at_s
    for turn, planned_turn in enumerate(conversation.turns, 1):
        due_s = max(free_s + planned_turn.think_s, due_s + planned_turn.gap_s)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        if planned_turn.keep_tokens is not None:
            del history[planned_turn.keep_tokens :]
        context = len(history)
        if turn == 1:
            shared = conversation.shared_tokens, conversation.shared_prompt
            history += run.prompts.first(source, planned_turn.new_tokens, *shared)
        else:
            history += run.prompts.later(source, planned_turn.new_tokens)
        body = orjson.dumps(greedy_body(history, planned_turn.output_tokens, run.model))
        sent_s = time.perf_counter()
        sample = Sample(
            conversation=number,
            turn=turn,
            sent_at_s=round(sent_s - run.start_s, 4),
            late_ms=round(1e3 * (sent_s - due_s), 2),
            context_tokens=context,
            new_tokens=planned_turn.new_tokens,
            output_tokens=planned_turn.output_tokens,
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


@dataclass(slots=True)
class _Times:
    """When a reply's tokens came, by ``time.perf_counter``."""

    first_s: float = 0.0
    last_s: float = 0.0
    gaps: Counter[int] = field(default_factory=Counter)

    def add(self) -> None:
        now_s = time.perf_counter()
        if self.first_s:
            self.gaps[gap_bucket(1e3 * (now_s - self.last_s))] += 1
        self.first_s = self.first_s or now_s
        self.last_s = now_s


async def _send(run: _Run, body: bytes, sample: Sample, sent_s: float) -> tuple[Sample, list[int]]:
    """Send one turn; return its sample and the ids of its reply."""
    times = _Times()
    stream = EventStream(times.add)
    failure: tuple[Failure, str] | None = None
    try:
        await generate(run.http, run.url, body, stream)
    except TimeoutError as error:
        failure = Failure.TIMEOUT, str(error) or "no end in time"
    except (aiohttp.ClientError, OSError) as error:
        failure = Failure.DROPPED, str(error) or type(error).__name__
    except ValueError as error:  # a line longer than any answer's
        failure = Failure.MALFORMED, str(error)
    sample = replace(
        sample,
        route=stream.headers.get("X-PPD-Route", ""),
        reason=stream.headers.get("X-PPD-Reason", ""),
    )
    if failure is not None:
        return _failed(sample, *failure), []
    if stream.status != 200:
        return _failed(sample, Failure.REFUSED, f"{stream.status} {stream.refusal}"), []
    return _measured(stream, times, sample, sent_s)


def _measured(
    stream: EventStream, times: _Times, sample: Sample, sent_s: float
) -> tuple[Sample, list[int]]:
    try:
        message, answer = stream.error_message(), stream.answer()
    except (orjson.JSONDecodeError, TypeError, ValueError, AttributeError) as error:
        # A stream that was cut ends in half an event.
        failure = Failure.MALFORMED if stream.done else Failure.DROPPED
        return _failed(sample, failure, f"no answer of /generate: {error}"), []
    ids = answer.ids
    if message is not None:
        return _failed(sample, Failure.ERROR, message[:300]), []
    if not stream.done:
        return _failed(sample, Failure.DROPPED, f"ended after {len(ids)} tokens, no [DONE]"), []
    if len(ids) != sample.output_tokens:
        reason = str(answer.finish_reason)[:200]
        text = f"got {len(ids)} tokens of {sample.output_tokens}: finish_reason {reason}"
        return _failed(sample, Failure.SHORT, text), []
    if not times.first_s:
        return _failed(sample, Failure.MALFORMED, "no event brings a token"), []
    return replace(
        sample,
        cached_tokens=answer.cached_tokens,
        ttft_ms=round(1e3 * (times.first_s - sent_s), 3),
        tpot_ms=round(1e3 * (times.last_s - times.first_s) / max(1, len(ids) - 1), 3),
        gaps=gaps_of(times.gaps),
    ), ids


def _failed(sample: Sample, failure: Failure, error: str) -> Sample:
    return replace(sample, failure=failure, error=error)
