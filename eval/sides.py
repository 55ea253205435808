"""One machine used in different ways: the workers of every shape, a router for each policy.

It starts them, and runs a plan on one side. Every side has both cores, except ``1R``, which has
one. The workers of all sides are up at once and share the cores; only those of the side that is
measured are busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

import aiohttp

from ppd.contract import Role

from .client import hold
from .cluster import Launcher, Process, gpu_flags, wait_all
from .endpoints import ANY_VOCABULARY, empty_caches, find_vocabulary
from .samples import Sample
from .summary import Slo, Summary, summarize
from .traffic.conversations import Conversation


class Shape(StrEnum):
    """Workers of a side; each has a core (or a GPU) of its own."""

    ONE_REPLICA = "1R"
    TWO_REPLICAS = "2R"
    DISAGGREGATED = "1P1D"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to use the machine.

    Attributes:
        name: as tables call it.
        policy: as of ``ppd-router --policy``.
    """

    name: str
    shape: Shape
    policy: str


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """SGLang's flags by role; ``every`` is for all of them."""

    every: tuple[str, ...] = ()
    by_role: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)

    def of(self, role: Role) -> tuple[str, ...]:
        """Return the flags of a role's workers."""
        return (*self.every, *self.by_role.get(role, ()))


@dataclass(frozen=True, slots=True)
class RunningSides:
    """The workers and routers of all sides.

    Attributes:
        workers: the URLs of all of them.
        routers: by side.
    """

    workers: tuple[str, ...]
    routers: Mapping[Side, Process]

    async def vocabulary(self, http: aiohttp.ClientSession) -> range:
        """Return token ids that all routers' workers take."""
        found = [await find_vocabulary(http, router.url) for router in self.routers.values()]
        return next((one for one in found if one is not None), ANY_VOCABULARY)


# Role and core of each worker. The one replica of ``1R`` is where decode workers are elsewhere.
_PLACES = {
    Shape.ONE_REPLICA: ((Role.REPLICA, 1),),
    Shape.TWO_REPLICAS: ((Role.REPLICA, 1), (Role.REPLICA, 0)),
    Shape.DISAGGREGATED: ((Role.PREFILL, 0), (Role.DECODE, 1)),
}


def start(launch: Launcher, model: str, sides: Sequence[Side], flags: WorkerFlags) -> RunningSides:
    """All workers and a router for each side, ready.

    Raises:
        ClusterError: one did not become ready.
    """
    workers: dict[Role, list[Process]] = {role: [] for role in Role}
    # Those of one shape may be a part of another's.
    places = list(dict.fromkeys(place for side in sides for place in _PLACES[side.shape]))
    for index, (role, core) in enumerate(places):
        gpu = gpu_flags(index, len(places))
        name = f"{role.value}{core}" if role is Role.REPLICA else role.value
        pinned = None if gpu else core
        worker = launch.worker(role, model, *flags.of(role), *gpu, name=name, core=pinned)
        workers[role].append(worker)
    started = [worker for of_role in workers.values() for worker in of_role]
    wait_all(started)
    routers = {side: _router(launch, side, workers) for side in sides}
    wait_all(list(routers.values()))
    return RunningSides(tuple(worker.url for worker in started), routers)


def _router(launch: Launcher, side: Side, workers: Mapping[Role, Sequence[Process]]) -> Process:
    policy = ("--policy", side.policy)
    match side.shape:
        case Shape.ONE_REPLICA:
            return launch.router([], [], *policy, replica=workers[Role.REPLICA][:1])
        case Shape.TWO_REPLICAS:
            return launch.router([], [], *policy, replica=workers[Role.REPLICA])
        case Shape.DISAGGREGATED:
            return launch.router(workers[Role.PREFILL], workers[Role.DECODE], *policy)
        case _:
            assert_never(side.shape)


async def measure(
    http: aiohttp.ClientSession,
    running: RunningSides,
    side: Side,
    plan: Sequence[Conversation],
    *,
    content: str,
    vocabulary: range,
    timeout_s: float,
) -> tuple[list[Sample], Summary]:
    """One run on one side, from empty caches.

    Args:
        content: the seed of the prompts' content; one that this side has not seen.
        timeout_s: of a turn; one that takes longer has failed.
    """
    await empty_caches(http, running.workers)
    begun_s = time.perf_counter()
    samples = await hold(
        running.routers[side].url,
        plan,
        seed=content,
        vocabulary=vocabulary,
        silence_s=timeout_s,
        timeout_s=timeout_s,
    )
    return samples, summarize(samples, plan, time.perf_counter() - begun_s, Slo())
