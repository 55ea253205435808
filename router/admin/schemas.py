"""The structures of operators' requests and responses; ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Literal

import msgspec

from ppd.announcement import Announcement
from ppd.contract import Role
from ppd.decision import Decision, Features, Route
from ppd.score import Objective
from ppd.table_file import Provenance
from ppd.table_policy import Correction

from ..observability.journal import DecisionRecord
from ..workers.sglang import Handshake


class WorkerHealth(msgspec.Struct, omit_defaults=True):
    """A worker in the response of ``/health``.

    Attributes:
        url: base URL of the worker.
        alive: whether it answered its last health check.
        model: the model that it serves, where there are several.
    """

    url: str
    role: Role
    alive: bool
    model: str = ""


class Health(msgspec.Struct):
    """The response of ``/health``.

    Attributes:
        status: ``ok``; ``degraded`` without a live worker of a required role, for all of several
            models; ``stopping`` at a stop.
    """

    status: Literal["ok", "degraded", "stopping"]
    workers: list[WorkerHealth]


class AddedWorker(msgspec.Struct, forbid_unknown_fields=True):
    """A worker that an operator adds.

    Attributes:
        url: base URL of the worker, ``http://HOST:PORT``.
    """

    url: str
    role: Role


class WorkerSummary(msgspec.Struct):
    """A worker after an operator's change.

    Attributes:
        id: host and port of the worker.
        url: base URL of the worker.
        draining: whether it gets no new work.
        in_flight: open requests to it, of all router processes on the port.
    """

    id: str
    url: str
    role: Role
    draining: bool
    in_flight: int


class WorkerState(msgspec.Struct, omit_defaults=True):
    """A worker and its state.

    Attributes:
        id: host and port of the server, and `@` and the rank where it has several.
        url: base URL of the worker.
        alive: whether it answered its last health check.
        draining: whether it gets no new work.
        breaker_open: whether the circuit breaker keeps requests from it.
        in_flight: open requests to it, of all router processes on the port; null if one of them
            does not respond.
        backlog_tokens: tokens sent there to prefill that it has not responded to yet.
        handshake: its properties, by the last handshake.
        announced: its last announcement; null without one.
        model: the model that it serves, where there are several.
    """

    id: str
    url: str
    role: Role
    alive: bool
    draining: bool
    breaker_open: bool
    in_flight: int | None
    backlog_tokens: int
    handshake: Handshake
    announced: Announcement | None
    model: str = ""


class RecentDecisions(msgspec.Struct):
    """The latest decisions.

    Attributes:
        policy: name and options of the policy that decides now.
        decisions: the newest one first.
    """

    policy: str
    decisions: list[DecisionRecord]


class Explanation(msgspec.Struct, omit_defaults=True):
    """The decision that a request would get now.

    Attributes:
        policy: name and options of the policy that decides.
        tenant: the sender of the request.
        objective: the weights or targets of the decision.
        features: the inputs of the decision; null if it needs none.
        model: the model of the request, where there are several.
        table: file of the decision table in use, and what it was measured on.
    """

    policy: str
    tenant: str
    objective: Objective
    features: Features | None
    decision: Decision
    model: str = ""
    table: str = ""


class ObservedFactor(msgspec.Struct):
    """The current correction factors of a cell and route.

    Attributes:
        cell: name of the cell.
        turns: weight of the observations, in turns.
        ttft: factor on the table's TTFT.
        tpot: factor on the table's TPOT.
    """

    cell: str
    route: Route
    turns: int
    ttft: float
    tpot: float


class TableState(msgspec.Struct):
    """The decision table in use; its fields are null without one.

    Attributes:
        policy: name and options of the policy that decides.
        corrections: the corrections that the policy applies.
        path: path of the table's file.
        digest: the first 16 hexadecimal digits of the file's SHA-256.
        model: the model that the table was measured with.
        shape: shape of the cluster that the table was measured on.
        provenance: the origin of the table.
        qps: turns per second and decode worker, as decisions use it.
        output_prediction_factor: typical ratio of a predicted and an actual reply length; null
            before the first reply.
        observed: what has been observed since.
    """

    policy: str
    corrections: list[Correction]
    path: str | None
    digest: str | None
    model: str | None
    shape: str | None
    provenance: Provenance | None
    qps: float
    output_prediction_factor: float | None
    observed: list[ObservedFactor]


class ResetResult(msgspec.Struct):
    """The result of a reset.

    Attributes:
        forgotten: number of correction factors that were deleted.
    """

    forgotten: int
