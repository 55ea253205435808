"""The gateway's messages about one exchange, in their order and within their times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from ppd.errors import PpdError, RequestError

from . import envoy
from .routing import Times

_RESPONSE = ("response_body", "response_trailers")  # after its head


class Stream(Protocol):
    """A stream of messages."""

    async def read(self) -> ProcessingRequest | None:
        """The next message; None at the end."""
        ...

    async def write(self, message: ProcessingResponse) -> None:
        """Answer."""
        ...


class ProtocolError(PpdError):
    """The gateway's messages are not those of the protocol, or of a mode that is served."""


class GoneError(PpdError):
    """The gateway has given the exchange up."""


class SilentError(PpdError):
    """The gateway had nothing of a response for too long."""


class Messages:
    """The messages of one exchange: a request, then its response.

    Args:
        stream: carries them.
        times: limits on the pauses between them.
        max_body_bytes: of the request.
    """

    def __init__(self, stream: Stream, times: Times, max_body_bytes: int) -> None:
        self._stream = stream
        self._times = times
        self._max_body_bytes = max_body_bytes
        self._trailers = False  # of the request

    # -- the request ---------------------------------------------------------------------------

    async def first(self) -> ProcessingRequest | None:
        """Return the message with the request's head; None: the gateway has given it up.

        Raises:
            ProtocolError: it is another message, or a mode is not served.
        """
        message = await self._stream.read()
        if message is None:
            return None
        if message.request_headers is None:
            raise ProtocolError(f"request_headers come first, not {envoy.kind_of(message)}")
        if (problem := envoy.mode_problem(message)) is not None:
            raise ProtocolError(problem)
        return message

    async def body(self) -> bytes:
        """Return the request's body.

        Raises:
            RequestError: it is too large, or comes too slowly.
            ProtocolError: another message comes before its end.
            GoneError: none comes.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                message = await self._read(self._times.request_s)
            except SilentError:
                raise RequestError("the body comes too slowly", status=408) from None
            part = message.request_body
            if message.request_trailers is not None:
                self._trailers = True
                return b"".join(parts)
            if part is None:
                raise ProtocolError(f"a request's body ends with {envoy.kind_of(message)}")
            parts.append(part.body)
            size += len(part.body)
            if size > self._max_body_bytes:
                text = f"the body is larger than {self._max_body_bytes} bytes"
                raise RequestError(text, status=413)
            if part.end_of_stream:
                return b"".join(parts)

    async def send(self, head: ProcessingResponse, body: bytes | None) -> None:
        """Give the gateway the request as a worker shall get it; None: it has no body."""
        await self.write(head)
        if body is None:
            return
        for message in envoy.request_body(body, end=not self._trailers):
            await self.write(message)
        if self._trailers:
            await self.write(envoy.trailers("request_trailers"))

    # -- the response --------------------------------------------------------------------------

    async def response(self) -> AsyncGenerator[ProcessingRequest, None]:
        """The messages of the response: its head, the parts of its body, its trailers.

        Raises:
            SilentError: the head, or more of the body, is too late.
            ProtocolError: another message comes.
            GoneError: the rest does not come.
        """
        limit_s, begun = self._times.answer_s, False
        while True:
            message = await self._read(limit_s)
            kind = envoy.kind_of(message)
            if kind != "response_headers" and (not begun or kind not in _RESPONSE):
                raise ProtocolError(f"{kind} is no part of a response, or comes too early")
            limit_s, begun = self._times.idle_s, True
            yield message
            if is_last(message):
                return

    async def pass_on(self, data: bytes, message: ProcessingRequest) -> None:
        """Answer a part of the response's body, or its trailers.

        Args:
            data: what the client gets.
            message: that is answered.
        """
        part = message.response_body
        if part is not None or data:
            for answer in envoy.response_body(data, part is not None and part.end_of_stream):
                await self.write(answer)
        if part is None:
            await self.write(envoy.trailers("response_trailers"))

    async def pass_all_on(self, response: AsyncIterator[ProcessingRequest]) -> None:
        """Pass the rest of a response on as it is."""
        async for message in response:
            await self.pass_on(data_of(message), message)

    async def write(self, message: ProcessingResponse) -> None:
        """Answer a message."""
        await self._stream.write(message)

    async def _read(self, limit_s: float) -> ProcessingRequest:
        try:
            async with asyncio.timeout(limit_s):
                message = await self._stream.read()
        except TimeoutError:
            raise SilentError(f"the gateway has sent nothing for {limit_s:g} s") from None
        if message is None:
            raise GoneError
        return message


def data_of(message: ProcessingRequest) -> bytes:
    """What a message has of a response's body."""
    return b"" if message.response_body is None else message.response_body.body


def is_last(message: ProcessingRequest) -> bool:
    """Whether a message of a response is its last one: trailers are, and what says so."""
    part = message.response_headers or message.response_body
    return part is None or part.end_of_stream
