"""The controller of data parallelism waits for requests.

Upstream's loop polls its socket without a pause (managers/data_parallel_controller.py:927), which
takes a core. Where ranks have cores of their own and nothing else, each collective then waits for
the rank beside which the controller runs.
"""

from __future__ import annotations

from typing import Any

_WAIT_MS = 1000  # then the watchdog is fed


def install() -> None:
    """Patch the controller's class in this process.

    Raises:
        AttributeError: SGLang has moved one of the names.
    """
    from sglang.srt.managers.data_parallel_controller import DataParallelController

    getattr(DataParallelController, "event_loop")  # noqa: B009 (it must exist)
    setattr(DataParallelController, "event_loop", _event_loop)  # noqa: B010


def _event_loop(self: Any) -> None:
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        self.soft_watchdog.feed()
        if self.recv_from_tokenizer.poll(_WAIT_MS):
            self._request_dispatcher(sock_recv(self.recv_from_tokenizer))
