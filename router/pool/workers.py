"""Threads that run engines, one for each core, over one scheduler.

Searches come in from any thread; what was found goes out through a callback, in the thread that
found it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ppd.ann import process
from ppd.ann.engine import Engine, Found, Pace, Search, StepShape
from ppd.ann.lanes import Backend
from ppd.ann.schedule import Controls, Scheduler, Stage

_log = logging.getLogger("ppd_router.pool")

Deliver = Callable[[list[Found]], None]
Clock = Callable[[], float]


class Workers:
    """
    Args:
        deliver: called with searches that have ended.
        failed: called once, if an engine breaks; nothing is searched any more then.
        clock: seconds, that of deadlines.
    """

    def __init__(
        self,
        count: int,
        scheduler: Scheduler,
        pace: Pace,
        shape: StepShape,
        backend: Backend,
        clock: Clock,
        deliver: Deliver,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._deliver = deliver
        self._failed = failed
        self._changed = threading.Condition()
        self._stopping = False
        engines = [
            Engine(scheduler, pace, clock, shape, backend, engines=count) for _ in range(count)
        ]
        self._running = [0] * count
        self._cores = process.own_cores(count)
        self._threads = [
            threading.Thread(target=self._run, args=(i, engine), name=f"pool-{i}", daemon=True)
            for i, engine in enumerate(engines)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Searches that run are not finished."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def submit(self, searches: list[Search]) -> None:
        """All of them, or none.

        Raises:
            Overloaded: as many wait as may.
        """
        with self._changed:
            self._scheduler.offer_all(searches)
            self._changed.notify(len(searches))

    def set_controls(self, controls: Controls) -> None:
        with self._changed:
            self._scheduler.controls = controls

    def running(self) -> int:
        """Searches that have begun; a moment ago."""
        return sum(self._running)

    def waiting(self, stage: Stage) -> int:
        with self._changed:
            return self._scheduler.waiting(stage)

    def _run(self, number: int, engine: Engine) -> None:
        if self._cores is not None:
            process.stay_on(self._cores[number])
        try:
            while self._turn(number, engine):
                pass
        except Exception as error:  # noqa: BLE001 - a thread ends here: it is told, not lost
            _log.exception("an engine broke")
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._failed(error)

    def _turn(self, number: int, engine: Engine) -> bool:
        with self._changed:
            while not (self._stopping or engine.running or self._scheduler.all_waiting()):
                self._changed.wait()
            if self._stopping:
                return False
            chosen, late = engine.choose(self._clock())
        found = engine.step(chosen, late)
        self._running[number] = len(engine.running)
        if found:
            self._deliver(found)
        return True
