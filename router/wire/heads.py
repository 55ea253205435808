"""Encoding of the heads of HTTP/1.1 messages."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


def response_head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    """Return the encoded head of a response.

    Args:
        status: HTTP status code.
        headers: by name.
        framing: further header lines, for the body's framing and the connection.
    """
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{line}{_lines(headers)}{framing}\r\n".encode(errors="surrogateescape")


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Return the encoded head of a request."""
    return f"{method} {target} HTTP/1.1\r\n{_lines(headers)}\r\n".encode(errors="surrogateescape")


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Return encoded header lines, each with its line end."""
    return _lines(headers).encode(errors="surrogateescape")


def _lines(headers: Mapping[str, str]) -> str:
    """Return header lines, each with its line end.

    No value can contain a line break: each is the router's own or has passed the parser.
    """
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
