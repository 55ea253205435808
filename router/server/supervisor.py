"""The supervisor of several router processes on one port.

The kernel distributes connections over the processes. Each has its own sessions and its own admin
port. A process forwards changes by operators and workers to the others (``peers.py``).
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

from ppd.errors import PpdError, TableError

from ..config.limits import AdmissionLimits, RateLimit, Tenant
from ..config.models import ModelOptions
from ..config.options import RouterConfig
from .listening import bind
from .reload import reloaded

logger = logging.getLogger("ppd.router")

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CANNOT_START = 3  # exit status of a process that printed why
_WRONG_TABLE = 4  # likewise: of a table that only a comparison with the workers shows to be wrong
_TRIAL_S = 10.0  # after the startup timeout; a failed start within it stops all processes
_RESTART_S = 1.0  # pause before a process that ended is restarted
_KEPT_CONFIGS = 3  # to fall back on


def share_of(config: RouterConfig, index: int, count: int, first_port: int) -> RouterConfig:
    """Return the configuration of one of ``count`` processes, with its share of each limit.

    Args:
        config: of all processes together.
        index: number of the process.
        count: of processes at the start; a reload does not change it.
        first_port: the first admin port at the start; a reload does not change it.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config.check()
    # By the shared store each process has the turns of all, and counts the tokens of all.
    alone = 1 if config.shared is not None else count
    return msgspec.structs.replace(
        config,
        admin_port=first_port + index,
        processes=count,
        rate=_shared(config.rate, count),
        tenants={name: _tenant(tenant, count) for name, tenant in config.tenants.items()},
        admission=_admission(config.admission, count),
        models={name: _model(model, count) for name, model in config.models.items()},
        append_budget_tokens=math.ceil(config.append_budget_tokens / alone),
        responses_max_bytes=math.ceil(config.responses_max_bytes / count),
        session_capacity=math.ceil(config.session_capacity / alone),
        decision_log=f"{config.decision_log}.{index}" if config.decision_log else "",
    )


def _shared(rate: RateLimit, count: int) -> RateLimit:
    return RateLimit(rate.requests_per_minute / count, rate.tokens_per_minute / count)


def _tenant(tenant: Tenant, count: int) -> Tenant:
    rate = None if tenant.rate is None else _shared(tenant.rate, count)
    return msgspec.structs.replace(tenant, rate=rate)


def _admission(limits: AdmissionLimits, count: int) -> AdmissionLimits:
    return msgspec.structs.replace(
        limits,
        max_in_flight=math.ceil(limits.max_in_flight / count),
        max_waiting=math.ceil(limits.max_waiting / count),
    )


def _model(model: ModelOptions, count: int) -> ModelOptions:
    own = None if model.admission is None else _admission(model.admission, count)
    return msgspec.structs.replace(model, admission=own)


class Supervisor:
    """Starts, restarts and stops the processes.

    Args:
        config: of all processes together.
        read: returns the present configuration.
        run: runs one process, given the configuration in force, its number and the shared port.
    """

    def __init__(
        self,
        config: RouterConfig,
        read: Callable[[], RouterConfig],
        run: Callable[[RouterConfig, int, int], None],
    ) -> None:
        self._configs = [config]  # the newest one is in force
        self._read = read
        self._run = run
        self._children: dict[int, int] = {}  # index by pid
        self._stopping = False

    def supervise(self) -> int:
        """Run until SIGTERM or SIGINT, and return the exit status.

        Raises:
            ConfigError: the address cannot be bound.
        """
        config = self._configs[0]
        reserved = bind(config.host, config.port, shared=True)  # never listens
        port = reserved.getsockname()[1]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        for index in range(config.processes):
            self._start(index, port, reserved)
        status = 0
        trial_ends_s = time.monotonic() + config.startup_timeout_s + _TRIAL_S
        while self._children:
            pid, code = os.wait()
            if pid not in self._children:  # in a container its first process gets all orphans
                continue
            index, ended = self._children.pop(pid), os.waitstatus_to_exitcode(code)
            if ended == _WRONG_TABLE and len(self._configs) > 1:
                self._configs.pop()
                logger.error("its table does not fit: it starts with the configuration before")
            elif ended in (CANNOT_START, _WRONG_TABLE) and time.monotonic() < trial_ends_s:
                self._stop(signal.SIGTERM, None)
            if self._stopping:
                status = status or ended
                continue
            logger.error("router process %d ended with %d: started again", index, ended)
            time.sleep(
                _RESTART_S
            )  # a process that always fails must not be restarted without a pause
            if not self._stopping:
                self._start(index, port, reserved)
        return status

    def _start(self, index: int, port: int, reserved: socket.socket) -> None:
        parent = os.getpid()
        signal.pthread_sigmask(
            signal.SIG_BLOCK, _SIGNALS
        )  # no signal may arrive before the child is registered
        pid = os.fork()
        if pid:
            self._children[pid] = index
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # blocked until it serves
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
            reserved.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(0)
            self._run(self._configs[-1], index, port)
            status = 0
        except SystemExit as ending:
            print(ending.code, file=sys.stderr)
            is_table = isinstance(ending.__context__, TableError)
            status = _WRONG_TABLE if is_table else CANNOT_START
        except BaseException:  # noqa: BLE001 - the child must not continue as a second supervisor
            traceback.print_exc()
        finally:
            os._exit(status)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopping = True
        self._forward(signal.SIGTERM, None)

    def _reload(self, number: int, frame: object) -> None:
        """Reload the processes, and start those that end later with the same configuration."""
        # Else a second signal would be handled within this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
        try:
            new = reloaded(self._configs[-1], self._read())
            if new != self._configs[-1]:
                started, *later = self._configs  # the first one is known to work
                self._configs = [started, *later[-_KEPT_CONFIGS:], new]
        except PpdError as error:
            logger.error("a process that starts again is not reloaded: %s", error)
        self._forward(number, frame)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])

    def _forward(self, number: int, _frame: object) -> None:
        for pid in self._children:
            with suppress(ProcessLookupError):  # the process has just ended
                os.kill(pid, number)
