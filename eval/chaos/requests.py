"""The requests of a chaos run, good and bad, and the outcomes that they must have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ppd.outcome import Outcome

from ..dialects import CHAT, COMPLETIONS, GENERATE, text_in
from ..fake_worker.fault import Fault
from ..http_stream import Reply, http_request

# Outcomes of a request that asks its decode worker for a fault: streaming, and not. A stream that
# breaks off may go on elsewhere, again and again, until it is whole.
_BY_DECODE = {
    Fault.RESETS: (Outcome.TRUNCATED, Outcome.WORKER_ERROR),
    Fault.ENDS_EARLY: (Outcome.TRUNCATED, Outcome.WORKER_ERROR),
    Fault.ERROR_FIRST: (Outcome.WORKER_ERROR, Outcome.WORKER_ERROR),
    Fault.ERROR_LATER: (Outcome.WORKER_ERROR, Outcome.WORKER_ERROR),
    Fault.ERROR_ENDS: (Outcome.WORKER_ERROR, Outcome.WORKER_ERROR),
    Fault.FAILS: (Outcome.WORKER_ERROR, Outcome.WORKER_ERROR),
    Fault.REJECTS: (Outcome.REJECTED, Outcome.REJECTED),
    Fault.DROPS: (Outcome.WORKER_ERROR, Outcome.WORKER_ERROR),
}
# The same for its prefill worker; local turns have none.
_BY_PREFILL = {
    Fault.FAILS: Outcome.WORKER_ERROR,
    Fault.REJECTS: Outcome.REJECTED,
    Fault.DROPS: Outcome.WORKER_ERROR,
    Fault.LATE: Outcome.OK,
}
_FILLER = "Tell me more about this, in a few words of your own. " * 5


@dataclass(slots=True)
class ClientConversation:
    """The history of a conversation, in the form that its endpoint takes.

    Attributes:
        ids: its prompt is token ids, not text.
    """

    name: str
    path: str
    ids: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    prompt: list[int] = field(default_factory=list)

    def add_prompt(self, text: str) -> None:
        """Append the client's next words."""
        if self.path == CHAT:
            self.messages.append({"role": "user", "content": text})
        elif self.ids:
            self.prompt += text.encode()
        else:
            self.text += text

    def add_reply(self, reply: Reply) -> None:
        """Append a whole answer."""
        text = text_in(self.path, reply.values)
        if self.path == CHAT:
            self.messages.append({"role": "assistant", "content": text})
        elif self.ids:
            self.prompt += reply.values[-1]["output_ids"]
        else:
            self.text += text

    def request(self, user: str, words: int, stream: bool) -> bytes:
        """Return the HTTP request of the next turn."""
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


def new_conversation(name: str, source: random.Random) -> ClientConversation:
    """Begin a conversation on a random endpoint."""
    path = source.choice((CHAT, CHAT, COMPLETIONS, GENERATE))
    conversation = ClientConversation(name, path, ids=path == GENERATE and source.random() < 0.5)
    conversation.add_prompt(f"{name} {source.random()} {_FILLER}")
    return conversation


def requested_fault(source: random.Random, stream: bool) -> tuple[str, Sequence[str]]:
    """Choose a fault; return the words that ask for it, and the outcomes it may lead to."""
    if source.random() < 0.3:
        fault = source.choice([*_BY_PREFILL])
        return f"prefill={fault}", (_BY_PREFILL[fault], Outcome.OK)
    fault = source.choice([*_BY_DECODE])
    outcome = _BY_DECODE[fault][0 if stream else 1]
    return f"decode={fault}", (outcome, Outcome.OK) if outcome == Outcome.TRUNCATED else (outcome,)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request that no worker should see.

    Attributes:
        status: of its answer.
        counted: the endpoint that the router counts it for; None: it is not counted.
        closes: the router closes the connection.
    """

    name: str
    request: bytes
    status: int
    counted: str | None
    closes: bool = False


def bad_request(source: random.Random) -> BadRequest:
    """Choose a bad request."""
    path = source.choice((CHAT, COMPLETIONS, GENERATE))
    good = orjson.dumps({"model": "fake", "messages": [], "prompt": "x", "text": "x"})
    other = orjson.dumps({"model": "another", "prompt": "x", "text": "x"})
    return source.choice(
        (
            BadRequest("no JSON", http_request(path, b'{"model": '), 400, path),
            BadRequest("no object", http_request(path, b"[]"), 400, path),
            BadRequest("no messages", http_request(CHAT, good), 400, CHAT),
            BadRequest("another model", http_request(path, other), 404, path),
            BadRequest("GET", http_request(path, b"", method="GET"), 405, path),
            BadRequest(
                "gzip",
                http_request(path, good, headers="Content-Encoding: gzip\r\n"),
                415,
                "",
                True,
            ),
            BadRequest(
                "two lengths",
                http_request(path, good, headers="Transfer-Encoding: chunked\r\n"),
                400,
                "",
                True,
            ),
            BadRequest("no such path", http_request("/v1/nothing", good), 404, None, True),
        )
    )
