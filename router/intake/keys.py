"""API keys of tenants, and the headers of a client that are forwarded to workers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ppd.errors import RequestError

from ..config.limits import Tenant
from .scrub import FORWARDED_HEADERS, tenant_of

_BEARER = "bearer "


class KeyRing:
    """Checks API keys.

    Args:
        tenants: by name; if any has keys, every request must carry one.
        worker_key: the API key of the workers. With it, as with keys of tenants, a client's own
            key is not forwarded.

    Attributes:
        checks_clients: clients' keys are checked here, not by the workers.
    """

    def __init__(self, tenants: Mapping[str, Tenant], worker_key: str) -> None:
        # By digest: the time of a look-up reveals nothing that a key could be searched with.
        self._names = {
            bytes.fromhex(digest): name for name, one in tenants.items() for digest in one.keys
        }
        self._worker_headers = {"authorization": f"Bearer {worker_key}"} if worker_key else {}
        self.checks_clients = bool(self._names or worker_key)
        shown = (h for h in FORWARDED_HEADERS if not (self.checks_clients and h == "authorization"))
        self._forwarded = list(shown)

    @property
    def closed(self) -> bool:
        """Whether only requests with a key are served."""
        return bool(self._names)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The sender's name; "" if no key is needed and none is given.

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
        """The headers that a worker gets."""
        seen = {name: headers[name] for name in self._forwarded if name in headers}
        return seen | self._worker_headers if self._worker_headers else seen
