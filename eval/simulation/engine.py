"""One simulated scheduler: a batch that decodes, a queue to prefill, and what a step does to them.

Prefill, decode and replica workers are the same engine: a prefill worker's jobs end with their
prefill, a decode worker's come with their KV or append to it, a replica's do everything. When a
step begins and ends is ``lockstep``'s.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from ppd.errors import ConfigError
from ppd.pacing import Pacer

from .cache import HostMemory, KvCache, SharedPrefix
from .cost_model import Costs, Extend
from .lockstep import Lockstep, Then


@dataclass(slots=True, eq=False)
class Job:
    """A request on one worker.

    Attributes:
        output_tokens: 0: it ends with its prefill.
        has_kv: its KV has come from elsewhere; else it is prefilled here.
        keeps_reply: what it generates stays cached, too.
        reserved: is called when there is a place for KV that is yet to come; ``deliver`` or
            ``release`` follows.
        min_cached_tokens: a precondition; ``refused`` is called if it is not met.
        shared: the prefix of its prompt that other conversations have, too.
    """

    session: int
    prompt_tokens: int
    output_tokens: int
    has_kv: bool
    done: Then
    first: Then | None = None
    refused: Then | None = None
    reserved: Then | None = None
    min_cached_tokens: int = 0
    keeps_reply: bool = True
    shared: SharedPrefix | None = None
    cached_tokens: int = field(default=0, init=False)
    left_tokens: int = field(default=0, init=False)
    ends_at_step: int = field(default=0, init=False)

    @property
    def kv_tokens(self) -> int:
        """The KV that it needs at its end."""
        return self.prompt_tokens + self.output_tokens


class Engine:
    """The scheduler of a simulated worker: continuous batching with chunked prefill.

    Args:
        lockstep: the steps of its server, of which it becomes a rank.
        chunk_tokens: most tokens of one step.
        pacer: chooses chunks beside decodes; None: as many tokens as fit a step.
        host: memory for what the device evicts; None: it is lost. What a prefill needs is copied
            back before it, one request after the other.

    Attributes:
        sequences: those that decode.
        busy_ms: time of the steps in which it had work.
    """

    def __init__(
        self,
        costs: Costs,
        lockstep: Lockstep,
        chunk_tokens: int,
        pacer: Pacer | None,
        host: HostMemory | None = None,
    ) -> None:
        self.cache = KvCache(costs.kv_capacity_tokens, host.tokens if host else 0)
        self._host = host
        self._host_free_ms = 0.0
        self.sequences = 0
        self.busy_ms = 0.0
        self._costs = costs
        self._lockstep = lockstep
        self._chunk_tokens = chunk_tokens
        self._pacer = pacer
        self._overlap = costs.overlap
        self._searches: list[tuple[float, Then]] = []
        self._waiting: deque[Job] = deque()  # for KV; in the order of their arrival
        self._delivered: deque[Job] = deque()  # whose KV has come to its place
        self._prefilling: deque[Job] = deque()
        self._chunk: list[tuple[Job, Extend]] = []  # of the step under way
        self._fresh: list[Job] = []  # their first token comes with the next step
        self._ends: list[tuple[int, int, Job]] = []
        self._pushed = 0
        self._context_tokens = 0  # of all that decode
        self._steps = 0  # decode steps ever taken
        self._rest_steps = 0  # decode steps before the next chunk
        self._stopped = False
        lockstep.ranks.append(self)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self._waiting) + len(self._prefilling)

    def submit(self, job: Job, now_ms: float) -> None:
        """Add a job.

        Raises:
            ConfigError: no worker could ever hold it.
        """
        if job.kv_tokens > self.cache.capacity_tokens:
            raise ConfigError(
                f"conversation {job.session} has a turn of {job.kv_tokens:,} tokens, context and "
                f"reply counted; the KV of a worker holds {self.cache.capacity_tokens:,}"
            )
        self._waiting.append(job)
        self._lockstep.arrived(now_ms)

    def deliver(self, job: Job, now_ms: float) -> None:
        """Add a job whose KV has come to the place that was reserved for it."""
        self._delivered.append(job)
        self._lockstep.arrived(now_ms)

    def release(self, job: Job, now_ms: float) -> None:
        """Give up a place, or the wait for it; what the cache had of the prompt stays there."""
        if self._stopped:
            return
        if job in self._waiting:
            self._waiting.remove(job)
        else:
            self.cache.give(job.session, job.kv_tokens, job.cached_tokens, job.shared)
        self._lockstep.arrived(now_ms)

    def search(self, ms: float, then: Then, now_ms: float) -> None:
        """Have the device run a vector search after the step under way.

        Searches that wait at the end of a step run side by side, before the next step.

        Args:
            ms: what it takes on the device.
            then: called at its end.
        """
        self._searches.append((ms, then))
        self._lockstep.arrived(now_ms)

    def step_ends_ms(self, now_ms: float) -> float:
        """Return when the step under way ends; now, if there is none."""
        return self._lockstep.step_ends_ms(now_ms)

    def stop(self, now_ms: float) -> dict[Job, int]:
        """Stop for good, with all that is under way.

        Returns:
            The requests that decode, and how many tokens each has generated.
        """
        self._stopped = True
        steps = self._steps + self._lockstep.stop(now_ms)
        return {job: job.output_tokens - (job.ends_at_step - steps) for *_, job in self._ends}

    # -- for the steps of the server -----------------------------------------------------------

    def take_searches(self) -> list[tuple[float, Then]]:
        """Return the searches that wait, and what each takes; they wait no longer."""
        taken, self._searches = self._searches, []
        return taken

    @property
    def wants_chunk(self) -> bool:
        """Whether the next step is to prefill here."""
        return bool(self._prefilling) and not (self._rest_steps and self._lockstep.decodes)

    @property
    def unchanged_steps(self) -> float:
        """How many decode steps may follow each other; infinite if it has no part in them."""
        if self._fresh:
            return 1
        steps: float = self._ends[0][0] - self._steps if self.sequences else math.inf
        return min(steps, self._rest_steps) if self._prefilling else steps

    def decode_ms(self, steps: int) -> float:
        """Return what decode steps of its batch take."""
        return self._costs.decode_ms(steps, self.sequences, self._context_tokens)

    def decode_steps(self, ms: float) -> int:
        """Return the least number of decode steps of its batch that take so long, at least one."""
        return self._costs.decode_steps(ms, self.sequences, self._context_tokens)

    def begin_chunk(self) -> float:
        """Begin a step in which some rank prefills.

        Returns:
            The milliseconds that its part takes; 0 if it has none.
        """
        self._chunk = self._next_chunk() if self.wants_chunk else []
        if not self._chunk and not self.sequences:
            return 0.0
        extends = [extend for _, extend in self._chunk]
        return self._costs.step_ms(self.sequences, self._context_tokens, extends)

    def end_chunk(self, ms: float, now_ms: float, *, beside_decodes: bool) -> None:
        """End such a step.

        Args:
            ms: what it took.
            beside_decodes: whether any rank decoded in it.
        """
        parts, self._chunk = self._chunk, []
        if parts or self.sequences:
            self.busy_ms += ms
        if self._pacer is not None and parts and beside_decodes:
            tokens = sum(extend.tokens for _, extend in parts)
            pairs = sum(extend.pairs for _, extend in parts)
            self._pacer.chunked(tokens, pairs / tokens, ms)
        self._advance(1, now_ms)
        for job, extend in parts:
            job.left_tokens -= extend.tokens
            if job.left_tokens:
                continue
            assert self._prefilling[0] is job
            self._prefilling.popleft()
            if job.first is not None:
                job.first(now_ms)
            if job.output_tokens > 1:
                self._join(job, job.output_tokens - 1)
            else:
                self._finish(job, now_ms)

    def end_decodes(self, ms: float, steps: int, now_ms: float) -> None:
        """End decode steps that took ``ms`` together."""
        if self.sequences:
            self.busy_ms += ms
            if self._pacer is not None:
                for _ in range(min(steps, 4)):  # its average would hardly move with more
                    self._pacer.decoded(ms / steps)
        self._rest_steps = max(0, self._rest_steps - steps)
        self._advance(steps, now_ms)

    def admit(self, now_ms: float) -> None:
        """Take the jobs whose KV has come, and those that wait, as far as there is KV for them."""
        while self._delivered:
            self._take_delivered(self._delivered.popleft(), now_ms)
        while self._waiting:
            job = self._waiting[0]
            found = self.cache.cached_tokens(job.session)
            found = max(found, self.cache.host_tokens(job.session))
            if found < job.min_cached_tokens:
                assert job.refused is not None
                self._waiting.popleft()
                job.refused(now_ms)
                continue
            if not self.cache.can_take(job.kv_tokens):
                return
            self._waiting.popleft()
            # The last token is always computed: it gives the first of the reply.
            found = self.cache.take(job.session, job.kv_tokens, job.shared)
            job.cached_tokens = min(found, job.prompt_tokens - 1)
            if job.reserved is not None:
                job.reserved(now_ms)
            elif job.has_kv:
                self._take_delivered(job, now_ms)
            elif self._host and (
                more := self.cache.restorable(job.session, found, job.prompt_tokens)
            ):
                job.cached_tokens = min(found + more, job.prompt_tokens - 1)
                begins_ms = max(now_ms, self._host_free_ms)
                self._host_free_ms = begins_ms + more * self._host.token_ms
                self._lockstep.timer(self._host_free_ms, partial(self._came_back, job))
            else:
                self._prefill(job)

    def _came_back(self, job: Job, now_ms: float) -> None:
        if self._stopped:
            return
        self._prefill(job)  # the copy ran beside the step that had been launched
        self._lockstep.arrived(now_ms)

    def _prefill(self, job: Job) -> None:
        job.left_tokens = job.prompt_tokens - job.cached_tokens
        if self._overlap and self._lockstep.decodes and not self._prefilling:
            self._rest_steps = max(1, self._rest_steps)  # one has been launched already
        self._prefilling.append(job)

    def _take_delivered(self, job: Job, now_ms: float) -> None:
        """Take a request whose KV is here; with overlap its first token came with that."""
        if not self._overlap:
            self._join(job, job.output_tokens)
            self._fresh.append(job)
            return
        if job.first is not None:
            job.first(now_ms)
        if job.output_tokens > 1:
            self._join(job, job.output_tokens - 1)
        else:
            self._finish(job, now_ms)

    def _join(self, job: Job, steps: int) -> None:
        self.sequences += 1
        self._context_tokens += job.kv_tokens - steps
        job.ends_at_step = self._steps + steps
        self._pushed += 1
        heapq.heappush(self._ends, (job.ends_at_step, self._pushed, job))

    def _next_chunk(self) -> list[tuple[Job, Extend]]:
        parts: list[tuple[Job, Extend]] = []
        budget = max(1, self._chunk_tokens - self.sequences)
        if self._pacer is not None and self._lockstep.decodes:
            job = self._prefilling[0]
            behind = sum(other.left_tokens for other in self._prefilling) - job.left_tokens
            computed = job.prompt_tokens - job.left_tokens
            chunk = self._pacer.next_chunk(job.left_tokens, computed, behind)
            budget, self._rest_steps = chunk.tokens, chunk.decode_steps
        for job in self._prefilling:
            tokens = min(budget, job.left_tokens)
            if not tokens:
                break
            parts.append((job, Extend(tokens, job.prompt_tokens - job.left_tokens)))
            budget -= tokens
        return parts

    def _advance(self, steps: int, now_ms: float) -> None:
        """Every sequence of the batch has ``steps`` more tokens."""
        if not self.sequences:
            return
        self._steps += steps
        self._context_tokens += steps * self.sequences
        for job in self._fresh:
            if job.first is not None:
                job.first(now_ms)
        self._fresh.clear()
        while self._ends and self._ends[0][0] <= self._steps:
            ends_at_step, _, job = heapq.heappop(self._ends)
            assert ends_at_step == self._steps, "a run went past the end of a sequence"
            self.sequences -= 1
            self._context_tokens -= job.kv_tokens
            self._finish(job, now_ms)

    def _finish(self, job: Job, now_ms: float) -> None:
        # The last generated token was never fed back.
        reply = max(0, job.output_tokens - 1) if job.keeps_reply else 0
        kept = job.prompt_tokens + reply
        self.cache.give(job.session, job.kv_tokens, kept, job.shared)
        job.done(now_ms)
