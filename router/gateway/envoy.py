"""Messages of Envoy's external processing protocol, as far as an endpoint picker needs them.

Sources: Envoy's ``envoy/service/ext_proc/v3/external_processor.proto``, and proposal 004 of the
Gateway API inference extension, "Endpoint Picker Protocol".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from betterproto2 import which_one_of
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"

_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET = f"{DESTINATION}-subset"
_SERVED = f"{DESTINATION}-served"
_MAX_CHUNK = 60_000  # bytes of one message's body: Envoy takes at most 64 KiB
_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
_OVERWRITE = HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD


def kind_of(message: ProcessingRequest) -> str:
    """Return which part of an exchange a message has, as ``request_body``; "": none."""
    name: str = which_one_of(message, "request")[0]
    return name


def mode_problem(message: ProcessingRequest) -> str | None:
    """Return why a stream's modes cannot be served; None if they can.

    Args:
        message: the first of the stream. Older versions of Envoy do not name the modes in it.
    """
    modes = message.protocol_config
    if modes is None:
        return None
    for name in ("request_body_mode", "response_body_mode"):
        mode = getattr(modes, name)
        if mode is not _DUPLEX:
            return f"{name} must be FULL_DUPLEX_STREAMED, not {mode.name or int(mode)}"
    return None


def headers_of(message: HttpHeaders) -> dict[str, str]:
    """Return headers by lower-case name; values of one name are joined by commas."""
    headers: dict[str, str] = {}
    for header in () if message.headers is None else message.headers.headers:
        name = header.key.lower()
        value = header.raw_value.decode(errors="surrogateescape") or header.value
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints that may be picked; None: all of them."""
    subset = _metadata(message, _SUBSET_NAMESPACE).get(_SUBSET)
    return None if subset is None else frozenset(map(str, subset))


def served_by(message: ProcessingRequest) -> str | None:
    """Return the endpoint that has answered; None if the gateway does not name it."""
    served = _metadata(message, _NAMESPACE).get(_SERVED)
    return None if served is None else str(served)


def _metadata(message: ProcessingRequest, namespace: str) -> dict[str, Any]:
    known = message.metadata_context
    if known is None or namespace not in known.filter_metadata:
        return {}
    fields: dict[str, Any] = known.filter_metadata[namespace].to_dict()
    return fields


def request_head(
    endpoint: str, changed: Mapping[str, str], removed: Iterable[str]
) -> ProcessingResponse:
    """The head of a request, with its destination.

    Args:
        endpoint: host and port that the gateway sends it to.
        changed: headers to be set.
        removed: headers to be removed.
    """
    mutation = _mutation({DESTINATION: endpoint, **changed}, removed)
    common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    metadata = Struct.from_dict({_NAMESPACE: {DESTINATION: endpoint}})
    return ProcessingResponse(
        request_headers=HeadersResponse(response=common), dynamic_metadata=metadata
    )


def request_body(body: bytes, end: bool) -> Iterator[ProcessingResponse]:
    """The body of a request, in parts.

    Args:
        body: all of it.
        end: no trailers follow.
    """
    for part in _parts(body, end):
        yield ProcessingResponse(request_body=BodyResponse(response=part))


def response_head(changed: Mapping[str, str]) -> ProcessingResponse:
    """The head of a response, with some headers more."""
    common = CommonResponse(header_mutation=_mutation(changed, ()))
    return ProcessingResponse(response_headers=HeadersResponse(response=common))


def response_body(body: bytes, end: bool) -> Iterator[ProcessingResponse]:
    """A part of a response's body; ``end``: the last one, and no trailers follow."""
    for part in _parts(body, end):
        yield ProcessingResponse(response_body=BodyResponse(response=part))


def trailers(kind: str) -> ProcessingResponse:
    """Trailers unchanged; ``kind`` is ``request_trailers`` or ``response_trailers``."""
    if kind == "request_trailers":
        return ProcessingResponse(request_trailers=TrailersResponse())
    return ProcessingResponse(response_trailers=TrailersResponse())


def immediate(status: int, headers: Mapping[str, str], body: bytes) -> ProcessingResponse:
    """A response that the gateway gives by itself: the request goes to no worker."""
    answer = ImmediateResponse(
        status=HttpStatus(code=StatusCode(status)),
        headers=_mutation({"content-type": "application/json", **headers}, ()),
        body=body,
    )
    return ProcessingResponse(immediate_response=answer)


def _mutation(changed: Mapping[str, str], removed: Iterable[str]) -> HeaderMutation:
    options = [
        HeaderValueOption(
            header=HeaderValue(key=name.lower(), raw_value=value.encode(errors="surrogateescape")),
            append_action=_OVERWRITE,
        )
        for name, value in changed.items()
    ]
    return HeaderMutation(set_headers=options, remove_headers=list(removed))


def _parts(body: bytes, end: bool) -> Iterator[CommonResponse]:
    for start in range(0, max(1, len(body)), _MAX_CHUNK):
        chunk = body[start : start + _MAX_CHUNK]
        is_last = end and start + _MAX_CHUNK >= len(body)
        streamed = StreamedBodyResponse(body=chunk, end_of_stream=is_last)
        yield CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
