"""The router's own page: its files, and the one document about now that it asks for each second.

Reads what the rest of the router keeps, and keeps nothing of its own: what it tells of requests
is computed from the journal's last decisions, so its memory and its work are bounded.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ppd import __version__
from ppd.decision import Reason, Route

from ..observability.journal import Explained
from ..workers.worker import Worker
from .admin import Admin

PAGE = ("/dashboard", "/dashboard/{file}")  # without the state; the token is typed in there

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_READ = 1000  # decisions, at most
_SHOWN = 40  # of them one by one
_WINDOW_S = 300.0
_RATES_S = 10.0
_MIN_S = 0.1  # a rate over less would say nothing
_POINTS = 20  # of a chart
_STEPS_S = (0.5, 1.0, 2.5, 5.0, _WINDOW_S / _POINTS)  # between two of them
_LAST_TURN = 3  # it stands for all that follow


class Dashboard:
    """
    Args:
        admin: knows what is to be shown.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        folder = Path(__file__).with_name("page")
        self._files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in _TYPES}
        self._started_s = admin.clock()

    def add_routes(self, app: web.Application) -> None:
        page, file = PAGE
        app.router.add_get(page, self.page)
        app.router.add_get(f"{page}/state", self.state)
        app.router.add_get(file, self.file)

    async def page(self, request: web.Request) -> web.Response:
        return self._answer("page.html")

    async def file(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["file"])

    def _answer(self, name: str) -> web.Response:
        body = self._files.get(name)
        if body is None:
            raise web.HTTPNotFound
        return web.Response(
            body=body, content_type=_TYPES[Path(name).suffix], charset="utf-8", headers=_HEADERS
        )

    async def state(self, request: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self._state()),
            content_type="application/json",
            headers={**_HEADERS, "Cache-Control": "no-store"},
        )

    def _state(self) -> dict[str, Any]:
        admin, now_s = self._admin, self._admin.clock()
        kept = admin.journal.recent(_READ, None)
        covered_s = _WINDOW_S
        if len(kept) == _READ:  # what came before them is not known
            covered_s = min(_WINDOW_S, max(_MIN_S, now_s - kept[-1].decided.at_s))
        window = _since(kept, now_s - covered_s)
        return {
            "version": __version__,
            "up_s": now_s - self._started_s,
            "policy": admin.policy_spec,
            "table": admin.table.path.name if admin.table else None,
            "models": admin.pool.models,
            "roles": sorted(admin.roles),
            "known_turns": len(admin.index),
            "waiting": admin.admission.waiting,
            "kv_bytes_avoided": admin.metrics.bytes_avoided.get(),
            "workers": [self._worker(worker, now_s) for worker in admin.pool.workers],
            "window": {"covers_s": covered_s, **_counted(window)},
            "rates": _rates(window, now_s, min(_RATES_S, covered_s)),
            "ttft": _ttft(window, now_s, covered_s),
            "decisions": [
                {
                    "age_s": now_s - one.decided.at_s,
                    "decided": one.decided,
                    "finished": one.finished,
                }
                for one in kept[:_SHOWN]
            ],
        }

    def _worker(self, worker: Worker, now_s: float) -> dict[str, Any]:
        said = worker.announcement
        return {
            "id": worker.id,
            "url": worker.url,
            "role": worker.role,
            "alive": worker.alive,
            "draining": worker.draining,
            "ready": worker.ready,
            "breaker_open": worker.breaker.open,
            "in_flight": worker.in_flight,
            "backlog_tokens": self._admin.backlog.of(worker.identity),
            "local_prefill": worker.handshake.local_prefill,
            "running": worker.load.running if worker.load else None,
            "free_tokens": worker.load.free_tokens if worker.load else None,
            "announced": said.load if said else None,
            "heard_ago_s": None if worker.announced_at_s is None else now_s - worker.announced_at_s,
        }


def _since(kept: Sequence[Explained], at_s: float) -> list[Explained]:
    """Those decided since then; ``kept`` has the newest first."""
    return list(takewhile(lambda one: one.decided.at_s >= at_s, kept))


def _course(one: Explained) -> tuple[Route, Reason]:
    """As they came to be: a refused local turn ends as a remote one."""
    last = one.finished or one.decided.decision
    return last.route, last.reason


def _turn(one: Explained) -> int:
    features = one.decided.features
    return 1 if features is None else min(features.turn, _LAST_TURN)


def _counted(window: Iterable[Explained]) -> dict[str, Any]:
    reasons: Counter[tuple[Reason, Route]] = Counter()
    outcomes: Counter[str] = Counter()
    turns: Counter[tuple[int, Route]] = Counter()
    requests = under_way = prompt_tokens = cached_tokens = 0
    for one in window:
        route, reason = _course(one)
        requests += 1
        reasons[reason, route] += 1
        turns[_turn(one), route] += 1
        if one.finished is None:
            under_way += 1
            continue
        outcomes[one.finished.outcome] += 1
        prompt_tokens += one.finished.prompt_tokens or 0
        cached_tokens += one.finished.cached_tokens or 0
    return {
        "requests": requests,
        "under_way": under_way,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "outcomes": dict(outcomes.most_common()),
        "reasons": [
            {"reason": reason, "route": route, "count": count}
            for (reason, route), count in reasons.most_common()
        ],
        "turns": [
            {"turn": turn, "route": route, "count": count}
            for (turn, route), count in sorted(turns.items())
        ],
    }


def _rates(window: Sequence[Explained], now_s: float, over_s: float) -> dict[str, Any]:
    routes = Counter(_course(one)[0] for one in _since(window, now_s - over_s))
    return {
        "over_s": over_s,
        "per_s": {route: routes[route] / over_s for route in Route},
    }


def _ttft(window: Iterable[Explained], now_s: float, covered_s: float) -> dict[str, Any]:
    """TTFT by turn and route, whole and by steps; a point is (steps ago, requests, p50, p90)."""
    step_s = next(step for step in _STEPS_S if step * _POINTS >= covered_s)
    newest = math.floor(now_s / step_s)
    groups: defaultdict[tuple[int, Route], defaultdict[int, list[float]]]
    groups = defaultdict(lambda: defaultdict(list))
    for one in window:
        if one.finished is not None and one.finished.ttft_ms is not None:
            ago = newest - math.floor(one.decided.at_s / step_s)
            groups[_turn(one), one.finished.route][ago].append(one.finished.ttft_ms)
    return {
        "step_s": step_s,
        "points": _POINTS,
        "groups": [
            {
                "turn": turn,
                "route": route,
                **_percentiles([ms for step in steps.values() for ms in step]),
                "points": [
                    {"ago": ago, **_percentiles(steps[ago])}
                    for ago in sorted(steps, reverse=True)
                    if ago < _POINTS  # the step that has slid out by a part of itself
                ],
            }
            for (turn, route), steps in sorted(groups.items())
        ],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    """By nearest rank; of at least one value."""
    ranked = sorted(values)
    p50, p90 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.9))
    return {"n": len(ranked), "p50_ms": p50, "p90_ms": p90}
