"""Checks on where a request comes from: its bearer token, its address."""

from __future__ import annotations

import hmac
import ipaddress


def carries_token(authorization: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header holds ``token`` as its bearer token."""
    given = (authorization or "").encode(errors="surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def is_loopback(address: str | None) -> bool:
    """Whether an IP address is of this host's loopback range; False for no address."""
    try:
        given = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    # A socket of both families writes an IPv4 address as an IPv6 one.
    mapped = given.ipv4_mapped if isinstance(given, ipaddress.IPv6Address) else None
    return (mapped or given).is_loopback
