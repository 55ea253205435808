"""Who asks: API keys of tenants, and what of a client's headers a worker gets to see."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ppd.errors import RequestError

from ..config.limits import Tenant
from .scrub import FORWARDED_HEADERS, tenant_of

_BEARER = "bearer "


class KeyRing:
    """
    Args:
        tenants: by name; if any has keys, every request must carry one.
        worker_key: what workers want of whoever asks them; then, as with keys of our own, a
            client's key is not passed on.

    Attributes:
        judges: whether clients' keys are ours to accept, not the workers'.
    """

    def __init__(self, tenants: Mapping[str, Tenant], worker_key: str) -> None:
        # By digest: how long a look-up takes tells nothing of a key that one could search with.
        self._names = {
            bytes.fromhex(digest): name for name, one in tenants.items() for digest in one.keys
        }
        self._worker_headers = {"authorization": f"Bearer {worker_key}"} if worker_key else {}
        self.judges = bool(self._names or worker_key)
        shown = (h for h in FORWARDED_HEADERS if not (self.judges and h == "authorization"))
        self._forwarded = list(shown)

    @property
    def closed(self) -> bool:
        """Only those with a key are served."""
        return bool(self._names)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The name of whoever asks; "" if nobody needs a key and none is given.

        Args:
            headers: by lower-case name.

        Raises:
            RequestError: there is no key, or an unknown one.
        """
        given = headers.get("authorization")
        if not self._names:
            return tenant_of(given)
        if given is None:
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        elif given[: len(_BEARER)].lower() == _BEARER:
            key = given[len(_BEARER) :].strip()
        else:
            key = ""
        name = self._names.get(hashlib.sha256(key.encode(errors="surrogateescape")).digest())
        if name is None:
            what = "not known here" if key else "needed: Authorization: Bearer KEY"
            raise RequestError(f"an API key is {what}", status=401, code="invalid_api_key")
        return name

    def forwarded(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What a worker gets to see."""
        seen = {name: headers[name] for name in self._forwarded if name in headers}
        return seen | self._worker_headers if self._worker_headers else seen
