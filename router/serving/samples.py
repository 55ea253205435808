"""``n`` > 1: so many requests of one sample each, side by side, answered as one.

Why: ``NO_PARALLEL_SAMPLES`` in ``router/workers/sglang.py``. The later
requests find the prompt in the caches that the first one fills.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from operator import itemgetter
from typing import Any

import orjson

from ..answers import STOPPING_ANSWER
from ..wire.request import Listener
from .internal import InternalRequest, ServerRequest, chunks_of, parsed
from .sse import DONE

_Serve = Callable[[ServerRequest], Coroutine[Any, Any, None]]


async def serve_samples(request: ServerRequest, count: int, serve: _Serve) -> None:
    """Serve a request for several replies as so many requests for one.

    Args:
        request: the client's.
        count: how many replies.
        serve: serves one of the requests.
    """
    fields = orjson.loads(request.body)
    options = fields.get("stream_options")
    asks_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    served: list[asyncio.Task[None]] = []

    def give_up(refused: int) -> None:
        """Cancel all samples but the one that was refused: so is the request."""
        for index, one in enumerate(served):
            if index != refused:
                one.cancel()

    def give_up_silent() -> bool:
        """Cancel samples that have not begun, as the router stops; True if there were any."""
        silent = [
            task
            for task, sample in zip(served, merge.samples, strict=True)
            if sample.listener is None and not task.done()
        ]
        for task in silent:
            task.cancel()
        return bool(silent)

    merge = _Merge(request, count, asks_usage, give_up, give_up_silent)
    async with asyncio.TaskGroup() as tasks:
        served += [
            tasks.create_task(serve(merge.request(index, dict(fields)))) for index in range(count)
        ]
    merge.end()


class _Merge:
    """The answers of all samples, becoming one.

    Args:
        give_up: cancels the others, when the sample of that index was refused.
        give_up_silent: cancels those that have not begun; True if there were any.
    """

    def __init__(
        self,
        request: ServerRequest,
        count: int,
        asks_usage: bool,
        give_up: Callable[[int], None],
        give_up_silent: Callable[[], bool],
    ) -> None:
        self.give_up = give_up
        self._give_up_silent = give_up_silent
        self._stop_written = False
        self._request = request
        self._asks_usage = asks_usage
        self._connection = request.connection
        self._count = count
        self.samples = [_Sample(self, index) for index in range(count)]
        self.first: dict[str, Any] = {}  # what all chunks have in common

    def request(self, index: int, fields: dict[str, Any]) -> InternalRequest:
        fields["n"] = 1
        fields.pop("best_of", None)
        if index and isinstance(rid := fields.get("rid"), str):
            fields["rid"] = f"{rid}-{index}"
        if isinstance(seed := fields.get("seed"), int):
            fields["seed"] = seed + index
        if fields.get("stream"):  # to be added up
            fields["stream_options"] = {**(fields.get("stream_options") or {})}
            fields["stream_options"]["include_usage"] = True
        request, body = self._request, orjson.dumps(fields)
        sample = self.samples[index]
        return InternalRequest(request.path, request.headers, body, sample, sample)

    # -- the client's connection, for all samples ----------------------------------------

    @property
    def stopping(self) -> bool:
        return self._connection.stopping

    def set_listener(self) -> None:
        self._connection.set_listener(self)

    def pause(self) -> None:
        for listener in self._listeners:
            listener.pause()

    def resume(self) -> None:
        for listener in self._listeners:
            listener.resume()

    def stop(self) -> None:
        for listener in self._listeners:
            listener.stop()
        if self._give_up_silent() and not self._stop_written:  # those that began have written it
            self.write_error(parsed(STOPPING_ANSWER.body))

    @property
    def _listeners(self) -> list[Listener]:
        return [one.listener for one in self.samples if one.listener is not None]

    # -- answers of the samples -----------------------------------------------------------

    def start(self, headers: Mapping[str, str]) -> None:
        if not self._request.answered:
            self._request.start(200, headers, b"")

    def write_chunk(self, chunk: dict[str, Any]) -> None:
        self._request.write(b"data: %b\n\n" % orjson.dumps(chunk))

    def write_error(self, error: dict[str, Any]) -> None:
        """Write a sample's error; that the router stops is written once."""
        if not self._stop_written:
            self.write_chunk(error)
        self._stop_written = self.stopping

    def end(self) -> None:
        """Write the end, once all samples have ended."""
        request = self._request
        refused = [s for s in self.samples if s.status != 200]
        if request.answered:  # a stream; what became of a sample stands in its events
            if any(s.broken_off for s in self.samples):
                request.abort()
                return
            for sample in refused:
                self.write_chunk(parsed(sample.body))
            if self._asks_usage and (usage := self._usage()) is not None:
                self.write_chunk({**self.first, "choices": [], "usage": usage})
            request.write(DONE)
            request.end()
        elif refused:
            request.respond(refused[0].status, refused[0].body, refused[0].headers)
        else:
            answer = parsed(self.samples[0].body)
            choices = []
            for index, sample in enumerate(self.samples):
                sample.usage = sample.answer.get("usage")
                choices += self.numbered(sample.answer["choices"], index)
            choices.sort(key=itemgetter("index"))
            answer |= {"choices": choices, "usage": self._usage()}
            request.respond(200, orjson.dumps(answer), self.samples[0].headers)

    def numbered(self, choices: Iterable[dict[str, Any]], sample: int) -> list[dict[str, Any]]:
        """A sample's choices with the numbers that OpenAI gives them: a prompt's are together.

        Args:
            choices: one of each prompt, with the prompt's number.
            sample: number of the sample.
        """
        return [{**one, "index": one.get("index", 0) * self._count + sample} for one in choices]

    def _usage(self) -> dict[str, Any] | None:
        """The sum; the prompt counts once, as the first sample has it."""
        counted = [s.usage for s in self.samples if s.usage is not None]
        if not counted:
            return None
        made = sum(usage.get("completion_tokens") or 0 for usage in counted)
        prompt = counted[0].get("prompt_tokens") or 0
        return {**counted[0], "completion_tokens": made, "total_tokens": prompt + made}


class _Sample:
    """The ``ResponseWriter`` of one sample, and the client's connection as that sample sees it.

    Attributes:
        listener: of the sample's stream, once there is one.
    """

    def __init__(self, merge: _Merge, index: int) -> None:
        self._merge = merge
        self._index = index
        self.status = 200
        self.body = b""
        self.headers: Mapping[str, str] = {}
        self.usage: dict[str, Any] | None = None
        self.broken_off = False
        self.listener: Listener | None = None

    @property
    def stopping(self) -> bool:
        return self._merge.stopping

    def set_listener(self, listener: Listener | None) -> None:
        if listener is not None:
            self.listener = listener
            self._merge.set_listener()
            if self.stopping:
                listener.stop()

    @property
    def answer(self) -> dict[str, Any]:
        return parsed(self.body)

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status, self.body, self.headers = status, body, headers
        if status != 200:
            self._merge.give_up(self._index)

    def start(self, headers: Mapping[str, str]) -> None:
        self._merge.start(headers)

    def write(self, data: bytes) -> None:
        merge = self._merge
        for chunk in chunks_of(data):
            if "choices" not in chunk:  # an error
                merge.write_error(chunk)
                continue
            merge.first = merge.first or {
                name: value for name, value in chunk.items() if name not in ("choices", "usage")
            }
            self.usage = chunk.pop("usage", None) or self.usage
            if chunk["choices"]:
                choices = merge.numbered(chunk["choices"], self._index)
                merge.write_chunk({**chunk, **merge.first, "choices": choices})

    def end(self) -> None:
        pass

    def abort(self) -> None:
        self.broken_off = True
