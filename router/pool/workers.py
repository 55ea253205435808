"""The threads that run search engines, one for each core, with one scheduler.

Any thread may submit searches. Results are passed to a callback in the engine's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ppd.ann import process
from ppd.ann.engine import Engine, Pace, StepShape
from ppd.ann.lanes import Backend
from ppd.ann.schedule import Controls, Scheduler, Stage
from ppd.ann.searches import Found, Search

_log = logging.getLogger("ppd_router.pool")

Deliver = Callable[[list[Found]], None]
Clock = Callable[[], float]


class Workers:
    """The engines' threads.

    Args:
        count: of threads.
        scheduler: that the searches wait in.
        pace: estimate of the time of an expansion, updated by the engines.
        shape: capacity of one step.
        backend: that the engines search with.
        clock: in seconds, the one of deadlines.
        deliver: is called with searches that have ended.
        failed: is called once if an engine raises. All engines stop then.
    """

    def __init__(
        self,
        count: int,
        scheduler: Scheduler[Search],
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
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads; running searches do not end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def submit(self, searches: list[Search]) -> None:
        """Queue all of the searches, or none.

        Raises:
            Overloaded: too many searches wait.
        """
        with self._changed:
            self._scheduler.offer_all(searches)
            self._changed.notify(len(searches))

    def set_controls(self, controls: Controls) -> None:
        """Replace the scheduler's settings."""
        with self._changed:
            self._scheduler.controls = controls

    def running(self) -> int:
        """Return the approximate number of searches that have begun."""
        return sum(self._running)

    def waiting(self, stage: Stage) -> int:
        """Return the number of searches of a stage that have not begun."""
        with self._changed:
            return self._scheduler.waiting(stage)

    def _run(self, number: int, engine: Engine) -> None:
        if self._cores is not None:
            process.stay_on(self._cores[number])
        try:
            while self._step(number, engine):
                pass
        except Exception as error:  # noqa: BLE001 - the end of a thread: reported by the callback
            _log.exception("an engine broke")
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._failed(error)

    def _step(self, number: int, engine: Engine) -> bool:
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
