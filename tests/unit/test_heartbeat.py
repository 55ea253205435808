"""Where a worker says it is."""

from __future__ import annotations

import pytest

from ppd.announcement import Announcement, parse
from ppd.contract import Role
from ppd.errors import ContractError
from sglang_patches.heartbeat import Address


@pytest.mark.parametrize(
    ("address", "own", "seen"),
    [
        (Address("10.0.0.5", 3000), "http://10.0.0.5:3000", "http://10.0.0.5:3000"),
        (Address("0.0.0.0", 3000), "http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        (Address("fd00::5", 3000, "https"), "https://[fd00::5]:3000", "https://[fd00::5]:3000"),
        (Address("0.0.0.0", 3000, "http", "http://w:1"), "http://127.0.0.1:3000", "http://w:1"),
    ],
)
def test_addresses(address: Address, own: str, seen: str) -> None:
    """A router on this machine reaches a server that listens everywhere over the loopback."""
    assert address.own_url() == own
    assert address.as_seen_from("http://127.0.0.1:8000") == seen


def test_what_a_newer_worker_adds_is_skipped() -> None:
    data = b'{"url": "http://w:1", "role": "decode", "boot_id": "x", "moods": ["fine"]}'
    assert parse(data) == Announcement(url="http://w:1", role=Role.DECODE, boot_id="x")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"url": 3}', b"\xff"])
def test_what_is_no_announcement_is_said_so(data: bytes) -> None:
    with pytest.raises(ContractError, match="no announcement"):
        parse(data)
