"""What Envoy and the sidecar of a decode worker do around an endpoint picker.

Envoy's side of the protocol over real gRPC: messages as Envoy sends them in the mode
FULL_DUPLEX_STREAMED, and the request goes where the picker says, as the picker has changed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import orjson
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamedBodyResponse,
)
from envoy_data_plane.google.protobuf import Struct

DESTINATION = "x-gateway-destination-endpoint"
PREFILL = "x-prefiller-host-port"
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED


@dataclass(slots=True)
class Exchanged:
    """One exchange, as the client and the workers have seen it."""

    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)  # of the client's response
    sent: dict[str, str] = field(default_factory=dict)  # headers of the worker's request
    sent_body: bytes = b""
    destination: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    immediate: bool = False

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def fields(self) -> Any:
        """Of the worker's request."""
        return orjson.loads(self.sent_body)

    @property
    def route(self) -> tuple[str, str]:
        return self.headers["x-ppd-route"], self.headers["x-ppd-reason"]


class Call:
    """One stream to the picker."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, **message: Any) -> None:
        await self._call.write(ProcessingRequest(**message))

    async def read(self) -> ProcessingResponse:
        message: ProcessingResponse = await self._call.read()
        assert message is not grpc.aio.EOF, await self._call.details()
        return message

    async def ends(self) -> tuple[Any, str]:
        """The status that the picker ends the stream with."""
        return await self._call.code(), await self._call.details()

    def give_up(self) -> None:
        """As Envoy does when its client is gone."""
        self._call.cancel()


class Gateway:
    """A gateway before one picker."""

    def __init__(self, channel: Any, http: aiohttp.ClientSession) -> None:
        self._process = channel.stream_stream(
            METHOD, ProcessingRequest.__bytes__, ProcessingResponse.parse
        )
        self._http = http

    def call(self) -> Call:
        return Call(self._process())

    async def post(
        self,
        path: str,
        body: object,
        headers: Mapping[str, str] | None = None,
        *,
        subset: Sequence[str] | None = None,
        parts: int = 1,
        trailers: bool = False,
        picked_only: bool = False,
    ) -> Exchanged:
        """Send a request through the gateway.

        Args:
            subset: the endpoints that the picker may pick from.
            parts: in which the body reaches the picker.
            trailers: follow the body.
            picked_only: give the exchange up when the picker has picked.
        """
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        call, seen = self.call(), Exchanged()
        head = {":method": "POST", ":path": path, "content-type": "application/json"}
        await call.send(**request_head({**head, **(headers or {})}, subset))
        size = max(1, -(-len(data) // parts))
        try:
            for start in range(0, max(1, len(data)), size):
                ends = start + size >= len(data) and not trailers
                part = HttpBody(body=data[start : start + size], end_of_stream=ends)
                await call.send(request_body=part)
            if trailers:
                await call.send(request_trailers=HttpTrailers(trailers=header_map({"x-a": "b"})))
            await self._request(call, seen, head | dict(headers or {}), trailers)
            if not seen.immediate and not picked_only:
                await self._response(call, seen, path)
        finally:
            call.give_up()
        return seen

    async def get(self, path: str) -> Exchanged:
        call, seen = self.call(), Exchanged()
        head = {":method": "GET", ":path": path}
        await call.send(**request_head(head, None, end=True))
        answer = await call.read()
        self._redirected(answer, seen, head)
        async with self._http.get(f"http://{seen.destination}{path}") as response:
            await self._relay(call, seen, response)
        call.give_up()
        return seen

    def _redirected(
        self, answer: ProcessingResponse, seen: Exchanged, headers: dict[str, str]
    ) -> None:
        if (response := answer.immediate_response) is not None:
            assert response.status is not None
            seen.status, seen.body, seen.immediate = int(response.status.code), response.body, True
            seen.headers = _changed({}, response.headers)
            return
        assert answer.request_headers is not None, answer
        assert answer.request_headers.response is not None
        seen.sent = _changed(headers, answer.request_headers.response.header_mutation)
        seen.destination = seen.sent.pop(DESTINATION)
        assert answer.dynamic_metadata is not None
        seen.metadata = answer.dynamic_metadata.to_dict()

    async def _request(
        self, call: Call, seen: Exchanged, headers: dict[str, str], trailers: bool
    ) -> None:
        self._redirected(await call.read(), seen, headers)
        if seen.immediate:
            return
        while True:
            answer = await call.read()
            if answer.request_trailers is not None:
                assert trailers
                return
            part = streamed(answer.request_body)
            assert len(part.body) <= 64 * 1024
            seen.sent_body += part.body
            if part.end_of_stream:
                return

    async def _response(self, call: Call, seen: Exchanged, path: str) -> None:
        """Send the request to the worker, as its sidecar does, and show the picker the answer."""
        headers = {k: v for k, v in seen.sent.items() if not k.startswith(":") and k != PREFILL}
        assert headers.pop("content-length") == str(len(seen.sent_body))
        bodies = {seen.destination: seen.sent_body}
        if (prefill := seen.sent.get(PREFILL)) is not None:
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 7, "bootstrap_port": 1}
            bodies = dict.fromkeys((prefill, seen.destination), orjson.dumps(seen.fields | room))
        async with AsyncExitStack() as stack:
            posts = [
                self._http.post(f"http://{host}{path}", data=data, headers=headers)
                for host, data in bodies.items()
            ]
            responses = await asyncio.gather(*map(stack.enter_async_context, posts))
            await self._relay(call, seen, responses[-1])

    async def _relay(self, call: Call, seen: Exchanged, response: Any) -> None:
        headers = {":status": str(response.status), "content-type": response.content_type}
        await call.send(response_headers=HttpHeaders(headers=header_map(headers)))
        answer = await call.read()
        seen.status = response.status
        assert answer.response_headers is not None
        assert answer.response_headers.response is not None
        seen.headers = _changed(headers, answer.response_headers.response.header_mutation)
        reading = asyncio.create_task(self._read_response(call, seen))
        try:
            async for data in response.content.iter_any():
                await call.send(response_body=HttpBody(body=data))
            await call.send(response_body=HttpBody(end_of_stream=True))
            await reading
        finally:
            reading.cancel()

    async def _read_response(self, call: Call, seen: Exchanged) -> None:
        while True:
            answer = await call.read()
            part = streamed(answer.response_body)
            seen.body += part.body
            if part.end_of_stream:
                return


def request_head(
    headers: Mapping[str, str], subset: Sequence[str] | None, *, end: bool = False
) -> dict[str, Any]:
    """The first message of a stream."""
    fields: dict[str, Any] = {
        "request_headers": HttpHeaders(headers=header_map(headers), end_of_stream=end),
        "protocol_config": ProtocolConfiguration(
            request_body_mode=DUPLEX, response_body_mode=DUPLEX
        ),
    }
    if subset is not None:
        known = {f"{DESTINATION}-subset": list(subset)}
        fields["metadata_context"] = metadata("envoy.lb.subset_hint", known)
    return fields


def metadata(namespace: str, fields: dict[str, Any]) -> Metadata:
    return Metadata(filter_metadata={namespace: Struct.from_dict(fields)})


def streamed(answer: Any) -> StreamedBodyResponse:
    """The part of a body in an answer."""
    part = answer.response.body_mutation.streamed_response
    assert isinstance(part, StreamedBodyResponse)
    return part


def header_map(headers: Mapping[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in headers.items()])


def _changed(headers: Mapping[str, str], mutation: Any) -> dict[str, str]:
    changed = dict(headers)
    if mutation is None:
        return changed
    for name in mutation.remove_headers:
        changed.pop(name, None)
    for option in mutation.set_headers:
        changed[option.header.key] = option.header.raw_value.decode()
    return changed


@asynccontextmanager
async def gateway(port: int, credentials: Any = None) -> AsyncIterator[Gateway]:
    """A gateway before the picker on a port."""
    async with AsyncExitStack() as stack:
        address = f"127.0.0.1:{port}"
        if credentials is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            channel = grpc.aio.secure_channel(address, credentials)
        await stack.enter_async_context(channel)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Gateway(channel, http)
