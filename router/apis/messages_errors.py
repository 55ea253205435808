"""Errors in the form of Anthropic's Messages API.

Source: Anthropic's API reference (errors).
"""

from __future__ import annotations

from typing import Literal

import msgspec

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesError(msgspec.Struct):
    """Anthropic's error object.

    Attributes:
        type: kind of the error, by its status.
        message: what is wrong, for people.
    """

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct):
    """The body of an error of the Messages API."""

    error: MessagesError
    type: Literal["error"] = "error"


def error_kind(status: int) -> str:
    """The type of an error with this status."""
    return _KINDS.get(status, "api_error")


def error_body(status: int, message: str) -> bytes:
    """The body of an error answer."""
    return msgspec.json.encode(MessagesErrorBody(MessagesError(error_kind(status), message)))
