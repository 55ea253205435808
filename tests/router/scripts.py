"""Scripts of the fake worker: the ways in which the tests' workers answer and fail."""

from __future__ import annotations

import asyncio
from typing import Any

from eval.dialects import DONE, Counts, error_answer, event
from eval.fake_worker.request import Request, Script
from eval.fake_worker.worker import FakeWorker


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return an answer's token counts as OpenAI's ``usage`` object."""
    return Counts(prompt, completion, cached).usage()


def token(text: str) -> bytes:
    """Return the event of one chat token."""
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def answering(prompt: int = 100, cached: int = 0, words: int = 3) -> Script:
    """Answer in full: ``words`` tokens, the usage, ``[DONE]``."""

    async def script(request: Request) -> None:
        body, counts = request.body, usage(prompt, words, cached)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "w" * words}
            request.answer({"choices": [{"message": message}], "usage": counts})
            return
        for i in range(words):
            request.send(token(f"w{i}"))
        if body["stream_options"]["include_usage"]:
            request.send(event({"choices": [], "usage": counts}))
        request.send(DONE)

    return script


def failing(status: int, message: str) -> Script:
    """Answer with an error at once, in SGLang's form."""

    async def script(request: Request) -> None:
        error = error_answer(message, status)
        if request.body.get("stream"):
            request.send(event({"error": error}) + DONE)
        else:
            request.answer(error, status)

    return script


async def hanging(request: Request) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def dropping(request: Request) -> None:
    """Close the connection without an answer."""
    request.drop()


async def resetting(request: Request) -> None:
    """Close the connection after two tokens."""
    request.send(token("one") + token("two"))
    request.drop()


async def ending_early(request: Request) -> None:
    """End the stream in good order without ``[DONE]``."""
    request.send(token("one"))


async def streaming_forever(request: Request) -> None:
    """Send one token, and then nothing until the router hangs up."""
    request.send(token("one"))
    await asyncio.Event().wait()


def gated(gate: asyncio.Event) -> Script:
    """Send one token, and ``[DONE]`` when the gate is open."""

    async def script(request: Request) -> None:
        request.send(token("one"))
        await gate.wait()
        request.send(DONE)

    return script


class InTurn:
    """A script of scripts, for one or several workers.

    Script ``i`` answers the ``i``-th request of all workers; the last one answers all further ones.

    Attributes:
        requests: all requests so far.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> None:
        """Answer one request."""
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        await script(request)

    @property
    def workers(self) -> list[FakeWorker]:
        """The workers that received the requests, in the requests' order."""
        return [request.worker for request in self.requests]

    @property
    def bodies(self) -> list[Any]:
        """The JSON bodies of all requests."""
        return [request.body for request in self.requests]
