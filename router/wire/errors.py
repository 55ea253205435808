"""What can become of a connection to a worker."""


class ConnectError(OSError):
    """A connection could not be had; nothing was sent."""
