"""Heads of messages, written."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


def response_head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    """
    Args:
        framing: header lines of the message itself.
    """
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{line}{_lines(headers)}{framing}\r\n".encode(errors="surrogateescape")


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    return f"{method} {target} HTTP/1.1\r\n{_lines(headers)}\r\n".encode(errors="surrogateescape")


def header_lines(headers: Mapping[str, str]) -> bytes:
    return _lines(headers).encode(errors="surrogateescape")


def _lines(headers: Mapping[str, str]) -> str:
    """Values are ours, or have been through a parser that lets no line break pass."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
