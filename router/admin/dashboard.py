"""The dashboard: the files of its page, and the state that the page fetches each second.

The module stores nothing of its own. Statistics of requests are computed from the latest
decisions of the journal, so memory and work are bounded.
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

from ..observability.journal import DecisionRecord
from ..serving.model import ServedModel
from ..workers.worker import Worker
from .admin import Admin

PAGE = (
    "/dashboard",
    "/dashboard/{file}",
)  # without the state; the user enters the token on the page

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

_MAX_READ = 1000  # decisions
_MAX_LISTED = 40  # of them, one by one
_WINDOW_S = 300.0
_RATES_S = 10.0
_MIN_S = 0.1  # a rate over a shorter time is meaningless
_POINTS = 20  # of a chart
_STEPS_S = (0.5, 1.0, 2.5, 5.0, _WINDOW_S / _POINTS)  # between two of them
_LAST_TURN = 3  # the group of this and all later turns


class Dashboard:
    """The routes of the dashboard.

    Args:
        admin: has the state that is shown.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        folder = Path(__file__).with_name("page")
        self._files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in _TYPES}
        self._started_s = admin.clock()

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to ``app``."""
        page, file = PAGE
        app.router.add_get(page, self.page)
        app.router.add_get(f"{page}/state", self.state)
        app.router.add_get(file, self.file)

    async def page(self, request: web.Request) -> web.Response:
        """Return the page."""
        return self._serve_file("page.html")

    async def file(self, request: web.Request) -> web.Response:
        """Return a file of the page."""
        return self._serve_file(request.match_info["file"])

    def _serve_file(self, name: str) -> web.Response:
        body = self._files.get(name)
        if body is None:
            raise web.HTTPNotFound
        return web.Response(
            body=body, content_type=_TYPES[Path(name).suffix], charset="utf-8", headers=_HEADERS
        )

    async def state(self, request: web.Request) -> web.Response:
        """Return the router's state, and statistics of the last five minutes."""
        return web.Response(
            body=msgspec.json.encode(self._state()),
            content_type="application/json",
            headers={**_HEADERS, "Cache-Control": "no-store"},
        )

    def _state(self) -> dict[str, Any]:
        admin, now_s = self._admin, self._admin.clock()
        records = admin.journal.recent(_MAX_READ, None)
        covered_s = _WINDOW_S
        if len(records) == _MAX_READ:  # earlier ones are no longer stored
            covered_s = min(_WINDOW_S, max(_MIN_S, now_s - records[-1].decided.at_s))
        window = _since(records, now_s - covered_s)
        models = list(admin.models.values())
        tables = [model.table for model in models]
        counts = (model.metrics.bytes_avoided.get() for model in models)
        avoided = [count for count in counts if count is not None]
        return {
            "version": __version__,
            "up_s": now_s - self._started_s,
            "policy": admin.policy_spec,
            "reasons": {reason: reason.description for reason in Reason},
            "table": ", ".join(str(table) for table in tables if table) or None,
            "models": [name for model in models for name in model.workers.models],
            "served": [self._model(model) for model in models] if len(models) > 1 else [],
            "roles": sorted(admin.roles),
            "known_turns": sum(len(model.index) for model in models),
            "waiting": sum(model.admission.waiting for model in models),
            "fallbacks": admin.active_fallbacks(),
            "store_problems": sorted(admin.sharing.problems()) if admin.sharing else [],
            "kv_bytes_avoided": sum(avoided) if avoided else None,
            "workers": [self._worker(worker, now_s) for worker in admin.registry.workers],
            "window": {"covers_s": covered_s, **_counts(window)},
            "rates": _rates(window, now_s, min(_RATES_S, covered_s)),
            "ttft": _ttft(window, now_s, covered_s),
            "decisions": [
                {
                    "age_s": now_s - record.decided.at_s,
                    "decided": record.decided,
                    "finished": record.finished,
                }
                for record in records[:_MAX_LISTED]
            ],
        }

    def _model(self, model: ServedModel) -> dict[str, Any]:
        """Return the state of one of several models."""
        ready = {worker.role for worker in model.workers.workers if worker.ready}
        return {
            "name": model.name,
            "table": str(model.table) if model.table else None,
            "known_turns": len(model.index),
            "waiting": model.admission.waiting,
            "missing": sorted(self._admin.roles - ready),
        }

    def _worker(self, worker: Worker, now_s: float) -> dict[str, Any]:
        server = worker.server
        announcement, model = server.announcement, self._admin.model_of(server)
        return {
            "id": worker.id,
            "url": worker.url,
            "role": worker.role,
            "model": self._admin.shown_model(server),
            "alive": worker.alive,
            "draining": worker.draining,
            "ready": worker.ready,
            "breaker_open": worker.breaker.open,
            "in_flight": worker.in_flight,
            "backlog_tokens": model.backlog.of(worker.identity),
            "local_prefill": worker.handshake.local_prefill,
            "lacks_kv_events": worker.alive and model.fallbacks.lacks_kv_events(worker),
            "running": worker.load.running if worker.load else None,
            "free_tokens": worker.load.free_tokens if worker.load else None,
            "announced": announcement.loads_of_ranks[worker.rank]
            if announcement and server.announces_load
            else None,
            "announced_ago_s": None
            if server.announced_at_s is None
            else now_s - server.announced_at_s,
        }


def _since(records: Sequence[DecisionRecord], at_s: float) -> list[DecisionRecord]:
    """Return the decisions since ``at_s``; ``records`` has the newest first."""
    return list(takewhile(lambda record: record.decided.at_s >= at_s, records))


def _final_route(record: DecisionRecord) -> tuple[Route, Reason]:
    """Return the route that was taken at last: a refused local turn becomes a remote one."""
    last = record.finished or record.decided.decision
    return last.route, last.reason


def _turn(record: DecisionRecord) -> int:
    features = record.decided.features
    return 1 if features is None else min(features.turn, _LAST_TURN)


def _counts(window: Iterable[DecisionRecord]) -> dict[str, Any]:
    reasons: Counter[tuple[Reason, Route]] = Counter()
    outcomes: Counter[str] = Counter()
    turns: Counter[tuple[int, Route]] = Counter()
    requests = under_way = prompt_tokens = cached_tokens = 0
    for record in window:
        route, reason = _final_route(record)
        requests += 1
        reasons[reason, route] += 1
        turns[_turn(record), route] += 1
        if record.finished is None:
            under_way += 1
            continue
        outcomes[record.finished.outcome] += 1
        prompt_tokens += record.finished.prompt_tokens or 0
        cached_tokens += record.finished.cached_tokens or 0
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


def _rates(window: Sequence[DecisionRecord], now_s: float, over_s: float) -> dict[str, Any]:
    routes = Counter(_final_route(record)[0] for record in _since(window, now_s - over_s))
    return {
        "over_s": over_s,
        "per_s": {route: routes[route] / over_s for route in Route},
    }


def _ttft(window: Iterable[DecisionRecord], now_s: float, covered_s: float) -> dict[str, Any]:
    """Return TTFT by turn and route: over the whole window, and for each step of the chart.

    Answers that did not stream have no TTFT. A point has the number of steps ago, the number of
    requests, and their p50 and p90.
    """
    step_s = next(step for step in _STEPS_S if step * _POINTS >= covered_s)
    newest = math.floor(now_s / step_s)
    groups: defaultdict[tuple[int, Route], defaultdict[int, list[float]]]
    groups = defaultdict(lambda: defaultdict(list))
    for record in window:
        if record.finished is not None and record.finished.ttft_ms is not None:
            ago = newest - math.floor(record.decided.at_s / step_s)
            groups[_turn(record), record.finished.route][ago].append(record.finished.ttft_ms)
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
                    if ago < _POINTS  # the oldest step lies partly outside the window
                ],
            }
            for (turn, route), steps in sorted(groups.items())
        ],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    """Return the number, p50 and p90 (nearest rank) of one or more values."""
    ranked = sorted(values)
    p50, p90 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.9))
    return {"n": len(ranked), "p50_ms": p50, "p90_ms": p90}
