"""One served model: its workers, and all that is decided, limited and counted for it alone."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.forecast import Forecast
from ppd.planning import Planner
from ppd.sessions import SessionIndex

from ..config.table_files import TableFile
from ..intake.admission import Admission
from ..observability.metrics import Metrics
from ..workers.fallbacks import Fallbacks
from ..workers.group import ModelWorkers
from ..workers.health import WorkerHealth
from .recorder import RequestRecorder
from .sending import Sender


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model and the parts of the router that belong to it; models share none of them.

    Attributes:
        workers: that serve it.
        planner: decides its turns, and holds its policy.
        table: the policy's decision table, if any.
        index: its conversations.
        arrivals: of its requests.
        forecast: of their lengths.
        backlog: of its workers.
        admission: limits its requests.
        health: takes successes and failures of its workers.
        sender: opens its legs.
        recorder: records its requests.
        metrics: of its requests and workers.
        fallbacks: what its workers do without.
    """

    workers: ModelWorkers
    planner: Planner
    table: TableFile | None
    index: SessionIndex
    arrivals: ArrivalRate
    forecast: Forecast
    backlog: Backlog
    admission: Admission
    health: WorkerHealth
    sender: Sender
    recorder: RequestRecorder
    metrics: Metrics
    fallbacks: Fallbacks

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.workers.name

    def qps(self, now_s: float) -> float:
        """Turns a second for each decode worker, as decisions use it."""
        return self.planner.qps(now_s)
