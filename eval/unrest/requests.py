"""What the clients of ``load-router`` send, good and bad, and what must become of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..dialects import CHAT, COMPLETIONS, GENERATE, text_in
from ..fake_worker.worker import Fault
from ..http_stream import Reply, http_request
from .account import OK, REJECTED, TRUNCATED, WORKER_ERROR

# What becomes of a request that asks its decode worker for a fault: streaming, and not. A stream
# that breaks off may go on elsewhere, again and again, until it is whole.
_BY_DECODE = {
    Fault.RESETS: (TRUNCATED, WORKER_ERROR),
    Fault.ENDS_EARLY: (TRUNCATED, WORKER_ERROR),
    Fault.ERROR_FIRST: (WORKER_ERROR, WORKER_ERROR),
    Fault.ERROR_LATER: (WORKER_ERROR, WORKER_ERROR),
    Fault.ERROR_ENDS: (WORKER_ERROR, WORKER_ERROR),
    Fault.FAILS: (WORKER_ERROR, WORKER_ERROR),
    Fault.REJECTS: (REJECTED, REJECTED),
    Fault.DROPS: (WORKER_ERROR, WORKER_ERROR),
}
# Its prefill worker; local turns have none.
_BY_PREFILL = {
    Fault.FAILS: WORKER_ERROR,
    Fault.REJECTS: REJECTED,
    Fault.DROPS: WORKER_ERROR,
    Fault.LATE: OK,
}
_FILLER = "Tell me more about this, in a few words of your own. " * 5


@dataclass(slots=True)
class Conversation:
    """What has been said in it, as its endpoint wants it repeated."""

    name: str
    path: str
    ids: bool  # token ids in place of a text
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    prompt: list[int] = field(default_factory=list)

    def say(self, what: str) -> None:
        """The client's next words."""
        if self.path == CHAT:
            self.messages.append({"role": "user", "content": what})
        elif self.ids:
            self.prompt += what.encode()
        else:
            self.text += what

    def heard(self, reply: Reply) -> None:
        """A whole answer becomes part of it."""
        text = text_in(self.path, reply.values)
        if self.path == CHAT:
            self.messages.append({"role": "assistant", "content": text})
        elif self.ids:
            self.prompt += reply.values[-1]["output_ids"]
        else:
            self.text += text

    def request(self, user: str, words: int, stream: bool) -> bytes:
        body: dict[str, Any] = {"user": user, "stream": stream}
        match self.path:
            case "/v1/chat/completions":
                body |= {"model": "fake", "messages": self.messages, "max_tokens": words}
            case "/v1/completions":
                prompt = self.prompt if self.ids else self.text
                body |= {"model": "fake", "prompt": prompt, "max_tokens": words}
            case _:
                body |= {"input_ids": self.prompt} if self.ids else {"text": self.text}
                body["sampling_params"] = {"max_new_tokens": words}
        return http_request(self.path, orjson.dumps(body))


def begin(name: str, source: random.Random) -> Conversation:
    path = source.choice((CHAT, CHAT, COMPLETIONS, GENERATE))
    talk = Conversation(name, path, ids=path == GENERATE and source.random() < 0.5)
    talk.say(f"{name} {source.random()} {_FILLER}")
    return talk


def fault_to_ask(source: random.Random, stream: bool) -> tuple[str, Sequence[str]]:
    """The words that ask a worker for a fault, and the outcomes that it may lead to."""
    if source.random() < 0.3:
        fault = source.choice([*_BY_PREFILL])
        return f"prefill={fault}", (_BY_PREFILL[fault], OK)
    fault = source.choice([*_BY_DECODE])
    outcome = _BY_DECODE[fault][0 if stream else 1]
    return f"decode={fault}", (outcome, OK) if outcome == TRUNCATED else (outcome,)


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that no worker should see.

    Attributes:
        counted: the endpoint that it is counted for; None: it is not counted.
    """

    name: str
    request: bytes
    status: int
    counted: str | None
    closes: bool = False


def bad_request(source: random.Random) -> Bad:
    path = source.choice((CHAT, COMPLETIONS, GENERATE))
    good = orjson.dumps({"model": "fake", "messages": [], "prompt": "x", "text": "x"})
    other = orjson.dumps({"model": "another", "prompt": "x", "text": "x"})
    return source.choice(
        (
            Bad("no JSON", http_request(path, b'{"model": '), 400, path),
            Bad("no object", http_request(path, b"[]"), 400, path),
            Bad("no messages", http_request(CHAT, good), 400, CHAT),
            Bad("another model", http_request(path, other), 404, path),
            Bad("GET", http_request(path, b"", method="GET"), 405, path),
            Bad(
                "gzip",
                http_request(path, good, headers="Content-Encoding: gzip\r\n"),
                415,
                "",
                True,
            ),
            Bad(
                "two lengths",
                http_request(path, good, headers="Transfer-Encoding: chunked\r\n"),
                400,
                "",
                True,
            ),
            Bad("no such path", http_request("/v1/nothing", good), 404, None, True),
        )
    )
