"""Who may look at the router, and who may change it.

With an admin token: whoever carries it. Without one anybody may look, and whoever is on the
router's own host may change things.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web

from ppd.errors import RequestError

from ..peers import Peers
from ..wire.access import carries_token, is_loopback

_READING = ("GET", "HEAD", "OPTIONS")
_ASKING = "/explain/"  # a POST that changes nothing


class Guard:
    """
    Args:
        token: "" if there is none.
        siblings: they pass on what operators have told them.
        open_to_all: ``METHOD PATH``, the path as its route was added.
    """

    def __init__(self, token: str, peers: Peers | None, open_to_all: Collection[str]) -> None:
        self._token = token
        self._peers = peers
        self._open = frozenset(open_to_all)

    def check(self, request: web.Request) -> None:
        """Raises:
        RequestError: this is no operator.
        """
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        if resource is None or f"{method} {resource.canonical}" in self._open:
            return  # who asks for what is not there may be told so
        if self._peers is not None and self._peers.asks(request):
            return
        if self._token:
            if not carries_token(request.headers.get("Authorization"), self._token):
                raise RequestError("operators must carry the admin token", status=401)
            return
        looks = request.method in _READING or resource.canonical.startswith(_ASKING)
        if not looks and not is_loopback(request.remote):
            message = "from other hosts only with an admin token: set $PPD_ADMIN_TOKEN"
            raise RequestError(message, status=403)
