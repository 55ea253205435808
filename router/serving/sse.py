"""Server-sent events of an engine, read only where routing needs it.

A stream's bytes are cut at event boundaries and passed on. Events are parsed only at
the head (an error before the first token) and at the tail (usage).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..workers.sglang import Usage, error_of, total_usage, usage_of_generate, usage_of_openai

DONE = b"data: [DONE]\n\n"
_DONE = (DONE, b"data: [DONE]\r\n\r\n")
# An event ends with an empty line; lines end either way, and servers do not mix them.
_ENDS = (b"\n\n", b"\n\r\n")
_EVENT = re.compile(rb".+?\n\r?\n", re.DOTALL)
# As SGLang's serializers write it. Inside a JSON string the quotes would be escaped, so
# generated text cannot forge it.
_USAGE = b'"usage":{'
_ERROR = b'data: {"error"'


def parse_event(event: bytes) -> Any:
    """The JSON of one event, or None if it carries none (``[DONE]``, a comment)."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    try:
        return orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return None


@dataclass(slots=True)
class EventCutter:
    """Cuts a byte stream into blocks of whole events."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> bytes:
        """The whole events that ``data`` completes (maybe none)."""
        if not self._rest and data.endswith(_ENDS):
            return data
        searched = max(0, len(self._rest) - 2)  # the old rest holds no end, but maybe half of one
        self._rest += data
        found = (self._rest.rfind(end, searched) + len(end) for end in _ENDS if end in self._rest)
        cut = max(found, default=0)
        block = bytes(self._rest[:cut])
        del self._rest[:cut]
        return block


def split_events(block: bytes) -> list[bytes]:
    """The events of a block of whole events, each with its end."""
    return _EVENT.findall(block)


@dataclass(slots=True)
class Tail:
    """Watches a stream's blocks for usage and the end.

    Attributes:
        hide_usage: drop the final usage event: the router asked for it, not the client.
        native: a ``/generate`` stream, where every event carries counts.
        batch: of several prompts, whose events say which one they are of.
        failed: the engine has ended it with an error.
    """

    hide_usage: bool
    native: bool
    batch: bool = False
    usage: Usage | None = None
    done: bool = False
    failed: bool = False
    _last: bytes = field(default=b"")
    _usages: dict[int, Usage] = field(default_factory=dict)

    def pass_on(self, block: bytes) -> bytes:
        """The part of a block that the client gets."""
        if block.endswith(_DONE):
            self.done = True
        if self.native:
            if self.batch:
                self._note_usages(block)
            elif self.done:
                self._read_last_event(self._last + block)
            self._last = block
            return block
        if _ERROR in block:
            self.failed = True
        if _USAGE not in block:
            return block
        return b"".join(event for event in split_events(block) if self._passes(event))

    def _note_usages(self, block: bytes) -> None:
        for event in split_events(block):
            answer = parse_event(event)
            if not isinstance(answer, dict):
                continue
            self.failed = self.failed or error_of(answer, 200) is not None
            if (usage := usage_of_generate(answer)) is not None:
                self._usages[answer.get("index", 0)] = usage
        self.usage = total_usage(self._usages.values())

    def breaks_off(self) -> None:
        """Note that the stream ended before ``[DONE]``, with an error of the engine or without."""
        if self.native and not self.batch:
            self._read_last_event(self._last)

    def _read_last_event(self, block: bytes) -> None:
        for event in reversed(split_events(block)):
            answer = parse_event(event)
            if isinstance(answer, dict):
                self.usage = usage_of_generate(answer)
                self.failed = error_of(answer, 200) is not None
                return

    def _passes(self, event: bytes) -> bool:
        if _USAGE not in event:
            return True
        answer = parse_event(event)
        if not isinstance(answer, dict):
            return True
        self.usage = usage_of_openai(answer) or self.usage
        # Continuous usage stands in events with choices; those are the client's.
        return bool(answer.get("choices")) or not self.hide_usage
