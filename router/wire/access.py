"""Checks of a request's origin: its bearer token and its address."""

from __future__ import annotations

import hmac
import ipaddress


def carries_token(authorization: str | None, token: str) -> bool:
    """Return whether an ``Authorization`` header has ``token`` as its bearer token."""
    given = (authorization or "").encode(errors="surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def is_loopback(address: str | None) -> bool:
    """Return whether an IP address is a loopback address; False for None."""
    try:
        given = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    # A dual-stack socket writes an IPv4 address as an IPv6 one.
    mapped = given.ipv4_mapped if isinstance(given, ipaddress.IPv6Address) else None
    return (mapped or given).is_loopback
