"""Several router processes on one port: started, kept running, stopped.

The kernel spreads connections over them. Each has sessions of its own and serves its operators on
a port of its own; what operators and workers tell one of them it passes on to the others
(``peers.py``).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ..config.limits import RateLimit, Tenant
from ..config.options import RouterConfig
from .listening import bind

logger = logging.getLogger("ppd.router")

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CANNOT_START = 3  # the exit status of one that told why
_TRIAL_S = 10.0  # and the startup timeout: who cannot start until then never could
_AGAIN_S = 1.0  # after which one that died is started again


def share_of(config: RouterConfig, index: int, count: int, first_port: int) -> RouterConfig:
    """What one of ``count`` processes is to do: limits are for all of them together.

    Args:
        first_port: for operators; as it was at start, as ``count``: neither can be reloaded.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config.check()
    admission = config.admission
    return msgspec.structs.replace(
        config,
        admin_port=first_port + index,
        processes=count,
        rate=_shared(config.rate, count),
        tenants={name: _tenant(one, count) for name, one in config.tenants.items()},
        admission=msgspec.structs.replace(
            admission,
            max_in_flight=math.ceil(admission.max_in_flight / count),
            max_waiting=math.ceil(admission.max_waiting / count),
        ),
        append_budget_tokens=math.ceil(config.append_budget_tokens / count),
        responses_max_bytes=math.ceil(config.responses_max_bytes / count),
        session_capacity=math.ceil(config.session_capacity / count),
        decision_log=f"{config.decision_log}.{index}" if config.decision_log else "",
    )


def _shared(rate: RateLimit, count: int) -> RateLimit:
    return RateLimit(rate.requests_per_minute / count, rate.tokens_per_minute / count)


def _tenant(tenant: Tenant, count: int) -> Tenant:
    rate = None if tenant.rate is None else _shared(tenant.rate, count)
    return msgspec.structs.replace(tenant, rate=rate)


class Supervisor:
    """
    Args:
        run: what one process does; told which one it is, and the port.
    """

    def __init__(self, config: RouterConfig, run: Callable[[int, int], None]) -> None:
        self._config = config
        self._run = run
        self._children: dict[int, int] = {}  # index by pid
        self._stopping = False

    def supervise(self) -> int:
        """Run until SIGTERM or SIGINT. Gives the exit status.

        Raises:
            ConfigError: the address cannot be had.
        """
        held = bind(self._config.host, self._config.port, shared=True)  # but not listened on
        port = held.getsockname()[1]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._pass_on)
        for index in range(self._config.processes):
            self._start(index, port, held)
        status = 0
        trial_ends_s = time.monotonic() + self._config.startup_timeout_s + _TRIAL_S
        while self._children:
            pid, code = os.wait()
            index, ended = self._children.pop(pid), os.waitstatus_to_exitcode(code)
            if ended == CANNOT_START and time.monotonic() < trial_ends_s:
                self._stop(signal.SIGTERM, None)
            if self._stopping:
                status = status or ended
                continue
            logger.error("router process %d ended with %d: started again", index, ended)
            time.sleep(_AGAIN_S)  # one that cannot run shall not be started without pause
            if not self._stopping:
                self._start(index, port, held)
        return status

    def _start(self, index: int, port: int, held: socket.socket) -> None:
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they shall find the child in its place
        pid = os.fork()
        if pid:
            self._children[pid] = index
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            held.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(0)
            self._run(index, port)
            status = 0
        except SystemExit as ending:
            print(ending.code, file=sys.stderr)
            status = CANNOT_START
        except BaseException:  # noqa: BLE001 - nothing may go on as a second parent
            traceback.print_exc()
        finally:
            os._exit(status)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopping = True
        self._pass_on(signal.SIGTERM, None)

    def _pass_on(self, number: int, _frame: object) -> None:
        for pid in self._children:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)
