"""What clients send their requests to, and what they must see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cluster import ClientError

CONVERSATIONS, TURNS = 8, 4


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What a client sends its requests to, and where it may write.

    Attributes:
        environments: folder of the environments that clients are installed in, on the first run.
    """

    url: str
    model: str
    folder: Path
    environments: Path


def require(holds: bool, problem: object) -> None:
    """Check what a client has seen.

    Raises:
        ClientError: it does not hold.
    """
    if not holds:
        raise ClientError(str(problem))
