"""Encryption of stored responses: AES-256-GCM, with a key for each tenant.

The store gets no name of a tenant, and no text. A response that was moved to another tenant or
another name cannot be opened.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ppd.errors import PpdError

_FORMAT = b"\x01"
_NONCE_BYTES = 12


class UnsealedError(PpdError):
    """A value cannot be opened: it is damaged, or was made with another key."""


class Sealing:
    """Encrypts responses.

    Args:
        key: of 32 bytes; all routers have the same.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def place(self, tenant: str, name: str) -> str:
        """Return the name under which the store has a response."""
        return self._derived(b"place", tenant.encode(), name.encode()).hex()[:32]

    def seal(self, tenant: str, name: str, parts: tuple[bytes, bytes]) -> bytes:
        """Encrypt a response and its conversation."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = msgspec.msgpack.encode(parts)
        return _FORMAT + nonce + self._cipher(tenant).encrypt(nonce, data, name.encode())

    def open(self, tenant: str, name: str, sealed: bytes) -> tuple[bytes, bytes]:
        """Decrypt a response and its conversation.

        Raises:
            UnsealedError: the value is damaged, or was made with another key.
        """
        nonce, data = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if sealed[:1] != _FORMAT:
                raise UnsealedError("a stored response has another format")
            opened = self._cipher(tenant).decrypt(nonce, data, name.encode())
            return msgspec.msgpack.decode(opened, type=tuple[bytes, bytes])
        except (InvalidTag, ValueError, msgspec.DecodeError) as error:
            raise UnsealedError(
                "a stored response was encrypted with another key, or is damaged"
            ) from error

    def _cipher(self, tenant: str) -> AESGCM:
        return AESGCM(self._derived(b"tenant", tenant.encode()))

    def _derived(self, *parts: bytes) -> bytes:
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(4, "big") + part)
        return digest.digest()
