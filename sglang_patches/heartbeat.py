"""Announces this worker to routers: every few seconds, and goodbye when it is told to stop.

Runs as a thread of SGLang's HTTP process and asks that server what a router would ask, so a
worker that does not answer, or whose scheduler hangs, falls silent. Knows nothing of the engine.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from ppd.announcement import INTERVAL_S, PATH, Announcement, WorkerLoad
from ppd.contract import Role

logger = logging.getLogger("ppd.engine")

_TIMEOUT_S = 2.0
_ROUTER_TIMEOUT_S = 8.0  # the first announcement is answered when hands have been shaken
_PATIENCE = 100  # beats before a server that never answered is told of: five minutes
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)  # of urllib; of odd host names
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # of "listen everywhere"


class _State(msgspec.Struct):
    """What the plugin adds to ``/server_info``, as far as a heartbeat needs it."""

    version: str
    local_prefill: bool
    boot_id: str
    running: int
    waiting: int
    append_tokens: int
    kv_used_tokens: int
    kv_total_tokens: int
    decode_step_ms: float | None
    flushes: int | None = None


class _Internal(msgspec.Struct):
    ppd: _State


class _ServerInfo(msgspec.Struct):
    version: str
    served_model_name: str
    page_size: int
    disaggregation_mode: Role
    disaggregation_bootstrap_port: int
    internal_states: Annotated[list[_Internal], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Address:
    """Where this server listens; ``advertised`` is what routers are told in its place."""

    host: str
    port: int
    scheme: str = "http"
    advertised: str | None = None

    def own_url(self) -> str:
        return self._url(_LOOPBACK.get(self.host, self.host))

    def as_seen_from(self, router: str) -> str:
        """What ``router`` shall call. Of a server that listens everywhere: the address of this
        machine on the way to the router."""
        if self.advertised:
            return self.advertised
        if self.host not in _LOOPBACK:
            return self._url(self.host)
        there = urlsplit(router)
        ways = socket.getaddrinfo(there.hostname, there.port, type=socket.SOCK_DGRAM)
        family, *_, address = ways[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return self._url(str(probe.getsockname()[0]))

    def _url(self, host: str) -> str:
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class Heartbeat:
    """
    Args:
        routers: their base URLs.
        token: the routers' shared secret, if they have one.
        api_key: of this server, if it has one.
    """

    def __init__(
        self, address: Address, routers: tuple[str, ...], token: str | None, api_key: str | None
    ) -> None:
        self._address = address
        self._routers = routers
        self._token = token
        self._api_key = api_key
        # Neither through a proxy; and a server is not to prove to itself who it is.
        direct = urllib.request.ProxyHandler({})
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        to_self = urllib.request.HTTPSHandler(context=unverified)
        self._to_self = urllib.request.build_opener(direct, to_self)
        self._to_router = urllib.request.build_opener(direct)
        self._unanswered = 0
        self._leaving = threading.Event()
        self._sent: dict[str, Announcement] = {}  # the last one to each router
        self._problems: dict[str, str | None] = {}  # told already; None: all is well
        self._thread = threading.Thread(target=self._run, name="ppd-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Say goodbye now; does not wait for it."""
        self._leaving.set()

    def _run(self) -> None:
        while not self._leaving.wait(INTERVAL_S):
            info = self._ask()
            if info is None:
                continue
            for router in self._routers:
                self._announce(router, info)
        for router, last in self._sent.items():
            self._post(router, msgspec.structs.replace(last, leaving=True))

    def _ask(self) -> _ServerInfo | None:
        """What this server says of itself; None if it does not serve (yet)."""
        own = self._address.own_url()
        try:
            with self._open(f"{own}/ready"):
                pass
            with self._open(f"{own}/server_info") as answer:
                info = msgspec.json.decode(answer.read(), type=_ServerInfo)
        except (*_NO_ANSWER, msgspec.DecodeError) as error:
            self._unanswered += 1
            if self._sent or self._unanswered > _PATIENCE:
                self._tell_once(own, f"no heartbeat: {own} does not answer ({error!r})")
            return None
        self._problems.pop(own, None)
        return info

    def _open(self, url: str) -> Any:
        request = urllib.request.Request(url)
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        return self._to_self.open(request, timeout=_TIMEOUT_S)

    def _announce(self, router: str, info: _ServerInfo) -> None:
        state = info.internal_states[0].ppd
        try:
            url = self._address.as_seen_from(router)
        except (OSError, UnicodeError) as error:
            self._tell_once(router, f"router {router} cannot be resolved: {error}")
            return
        self._sent[router] = Announcement(
            url=url,
            role=info.disaggregation_mode,
            boot_id=state.boot_id,
            models=(info.served_model_name,),
            bootstrap_port=info.disaggregation_bootstrap_port,
            page_size=info.page_size,
            versions={"sglang": info.version, "sglang-ppd": state.version},
            capabilities=("local_prefill",) if state.local_prefill else (),
            flushes=state.flushes,
            load=WorkerLoad(
                running=state.running,
                waiting=state.waiting,
                append_tokens=state.append_tokens,
                kv_used_tokens=state.kv_used_tokens,
                kv_total_tokens=state.kv_total_tokens,
                decode_step_ms=state.decode_step_ms,
            ),
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
                told = error.read(500).decode(errors="replace")
                problem = f"router {router} refuses the announcement: {error.code} {told}"
        except _NO_ANSWER as error:
            problem = f"router {router} does not answer: {error!r}"
        self._tell_once(router, problem, f"announced to {router} as {announcement.url}")

    def _tell_once(self, about: str, problem: str | None, fine: str = "") -> None:
        """Log what has changed, not the same every few seconds."""
        if about in self._problems and self._problems[about] == problem:
            return
        self._problems[about] = problem
        if problem is None:
            logger.info("%s", fine)
        else:
            logger.warning("%s", problem)
