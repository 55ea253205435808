"""Errors of connections to workers."""

from __future__ import annotations

from ppd.errors import PpdError


class ConnectError(PpdError, OSError):
    """A connection could not be established; nothing was sent."""


def describe(error: BaseException) -> str:
    """Return an error's message, or its type's name if the message is empty.

    Many errors of aiohttp and asyncio have an empty message.
    """
    return str(error) or type(error).__name__
