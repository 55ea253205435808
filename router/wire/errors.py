"""What can become of a connection to a worker."""


class ConnectError(OSError):
    """A connection could not be had; nothing was sent."""


def describe(error: BaseException) -> str:
    """An error in words; many of aiohttp's and asyncio's have an empty message."""
    return str(error) or type(error).__name__
