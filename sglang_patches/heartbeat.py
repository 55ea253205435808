"""The heartbeat: announces this worker to routers every few seconds, and when it leaves.

It runs as a thread of SGLang's HTTP process and sends that server the requests that a router
would send. So a worker that does not respond, or whose scheduler hangs, is not announced.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from ppd.announcement import INTERVAL_S, PATH, Announcement, announce
from ppd.contract import Role, WorkerDescription

logger = logging.getLogger("ppd.engine")

_READY_TIMEOUT_S = 2.0
_INFO_TIMEOUT_S = 8.0  # the scheduler answers between forwards, and a long prefill takes seconds
_ROUTER_TIMEOUT_S = 8.0  # the router responds to the first announcement after its handshake
_MAX_SILENT_BEATS = 100  # before a warning about a server that never responded: five minutes
_NO_RESPONSE = (OSError, http.client.HTTPException, ValueError)  # of urllib; of odd host names
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # of a wildcard address


class _InternalState(msgspec.Struct):
    ppd: WorkerDescription


class _ServerInfo(msgspec.Struct):
    """The fields of ``/server_info`` that the heartbeat reads."""

    version: str
    served_model_name: str
    page_size: int
    disaggregation_mode: Role
    disaggregation_bootstrap_port: int
    internal_states: Annotated[list[_InternalState], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Address:
    """The address on which this server listens.

    Attributes:
        advertised: base URL that is announced to routers in place of this address, if set.
    """

    host: str
    port: int
    scheme: str = "http"
    advertised: str | None = None

    def own_url(self) -> str:
        """The base URL under which this machine reaches the server."""
        return self._url(_LOOPBACK.get(self.host, self.host))

    def as_seen_from(self, router: str) -> str:
        """The base URL under which ``router`` reaches the server.

        For a server that listens on all interfaces, it holds the address of the interface that
        leads to the router.

        Raises:
            OSError: the router's host name cannot be resolved.
        """
        if self.advertised:
            return self.advertised
        if self.host not in _LOOPBACK:
            return self._url(self.host)
        parts = urlsplit(router)
        routes = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, *_, address = routes[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return self._url(str(probe.getsockname()[0]))

    def _url(self, host: str) -> str:
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class Heartbeat:
    """Threads that announce this server to routers: one reads its state, and one sends to each.

    So a router that does not answer delays no announcement to another one.

    Args:
        address: the address of this server.
        routers: base URLs of the routers.
        token: the routers' shared secret, if they have one.
        api_key: the API key of this server, if it has one.
    """

    def __init__(
        self, address: Address, routers: tuple[str, ...], token: str | None, api_key: str | None
    ) -> None:
        self._address = address
        self._routers = routers
        self._token = token
        self._api_key = api_key
        # No request goes through a proxy. The server's own certificate is not verified.
        direct = urllib.request.ProxyHandler({})
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        to_self = urllib.request.HTTPSHandler(context=unverified)
        self._to_self = urllib.request.build_opener(direct, to_self)
        self._to_router = urllib.request.build_opener(direct)
        self._silent_beats = 0
        self._leaving = threading.Event()
        self._sent: dict[str, Announcement] = {}  # the last announcement to each router
        self._problems: dict[str, str | None] = {}  # logged already; None: no problem
        self._senders: dict[str, threading.Thread] = {}  # the last one to each router
        self._thread = threading.Thread(target=self._run, name="ppd-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self) -> None:
        """Announce that the worker leaves, and stop; returns without waiting."""
        self._leaving.set()

    def _run(self) -> None:
        took_s = 0.0
        while not self._leaving.wait(max(0.0, INTERVAL_S - took_s)):
            began_s = time.monotonic()
            info = self._read_server_info()
            took_s = time.monotonic() - began_s
            if info is None:
                continue
            for router in self._routers:
                sender = self._senders.get(router)
                if sender is None or not sender.is_alive():
                    self._send(self._announce, router, info)
        for router, sender in list(self._senders.items()):
            self._send(self._sign_off, router, sender)

    def _send(self, work: Callable[..., None], router: str, *args: object) -> None:
        sender = threading.Thread(
            target=work, args=(router, *args), name="ppd-heartbeat-sender", daemon=True
        )
        self._senders[router] = sender
        sender.start()

    def _sign_off(self, router: str, before: threading.Thread) -> None:
        """Announce that the worker leaves, after the announcement under way."""
        before.join()
        if (last := self._sent.get(router)) is not None:
            self._post(router, msgspec.structs.replace(last, leaving=True))

    def _read_server_info(self) -> _ServerInfo | None:
        """Fetch this server's ``/server_info``; None if the server does not serve (yet)."""
        own = self._address.own_url()
        try:
            with self._open(f"{own}/ready", _READY_TIMEOUT_S):
                pass
            with self._open(f"{own}/server_info", _INFO_TIMEOUT_S) as response:
                info = msgspec.json.decode(response.read(), type=_ServerInfo)
        except (*_NO_RESPONSE, msgspec.DecodeError) as error:
            self._silent_beats += 1
            if self._sent or self._silent_beats > _MAX_SILENT_BEATS:
                self._log_change(own, f"no heartbeat: {own} does not answer ({error!r})")
            return None
        self._problems.pop(own, None)
        return info

    def _open(self, url: str, timeout_s: float) -> Any:
        request = urllib.request.Request(url)
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        return self._to_self.open(request, timeout=timeout_s)

    def _announce(self, router: str, info: _ServerInfo) -> None:
        try:
            url = self._address.as_seen_from(router)
        except (OSError, UnicodeError) as error:
            self._log_change(router, f"router {router} cannot be resolved: {error}")
            return
        self._sent[router] = announce(
            (state.ppd for state in info.internal_states),
            url=url,
            role=info.disaggregation_mode,
            models=(info.served_model_name,),
            bootstrap_port=info.disaggregation_bootstrap_port,
            page_size=info.page_size,
            sglang_version=info.version,
        )
        self._post(router, self._sent[router])

    def _post(self, router: str, announcement: Announcement) -> None:
        request = urllib.request.Request(
            router + PATH,
            data=msgspec.json.encode(announcement),
            headers={"Content-Type": "application/json"},
        )
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        problem = None
        try:
            try:
                with self._to_router.open(request, timeout=_ROUTER_TIMEOUT_S):
                    pass
            except urllib.error.HTTPError as error:
                response_text = error.read(500).decode(errors="replace")
                problem = f"router {router} refuses the announcement: {error.code} {response_text}"
        except _NO_RESPONSE as error:
            problem = f"router {router} does not answer: {error!r}"
        self._log_change(router, problem, f"announced to {router} as {announcement.url}")

    def _log_change(self, url: str, problem: str | None, success: str = "") -> None:
        """Log the state of the server at ``url`` when it has changed."""
        if url in self._problems and self._problems[url] == problem:
            return
        self._problems[url] = problem
        if problem is None:
            logger.info("%s", success)
        else:
            logger.warning("%s", problem)
