"""Access control of the operators' API.

With an admin token, every request must carry it. Without one, any client may read, and only
clients on the router's own host may change anything.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web

from ppd.errors import RequestError

from ..peers import READING, Peers
from ..wire.access import carries_token, is_loopback

_READ_METHODS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """The check of every request to the operators' API.

    Args:
        token: that operators must carry; "" if there is none.
        peers: other router processes, which forward operators' requests.
        open_to_all: routes without a check, as ``METHOD PATH`` with the path as it was added.
    """

    def __init__(self, token: str, peers: Peers | None, open_to_all: Collection[str]) -> None:
        self._token = token
        self._peers = peers
        self._open = frozenset(open_to_all)

    def check(self, request: web.Request) -> None:
        """Check that a request may be served.

        Raises:
            RequestError: it is not an operator's.
        """
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        if resource is None or f"{method} {resource.canonical}" in self._open:
            return  # an unknown path is answered by 404
        if self._peers is not None and self._peers.asks(request):
            return
        if self._token:
            if not carries_token(request.headers.get("Authorization"), self._token):
                raise RequestError("operators must carry the admin token", status=401)
            return
        reads = request.method in _READ_METHODS or resource.canonical.startswith(READING)
        if not reads and not is_loopback(request.remote):
            message = "from other hosts only with an admin token: set $PPD_ADMIN_TOKEN"
            raise RequestError(message, status=403)
