"""The aiohttp application: all that is asked of the router but the token path.

Its error answers are OpenAI's too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ppd.announcement import PATH as ANNOUNCEMENTS

from ..answers import ErrorAnswer, answer_to
from ..apis.front import PATHS
from ..apis.passthrough import PASSED_ON, Passthrough
from ..apis.response_store import BY_NAME, PEER_PATH, StoredResponses
from ..peers import Peers
from ..wire.request import Refusal
from ..workers.membership import Membership
from ..workers.registry import WorkerRegistry
from .admin import Admin
from .dashboard import PAGE, Dashboard
from .guard import Guard
from .operations import Operations

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_POOL = web.AppKey("pool", WorkerRegistry)
_GUARD = web.AppKey("guard", Guard)

# Announcements have a token of their own, processes on the port a secret.
_OPEN = (
    "GET /health",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{model}",
    f"POST {ANNOUNCEMENTS}",
    *(f"GET {path}" for path in PAGE),
    *(f"POST {path}" for path in PASSED_ON),
    *(f"{method} {path}" for path in (BY_NAME, PEER_PATH) for method in ("GET", "DELETE")),
)


def public(
    pool: WorkerRegistry,
    admin: Admin,
    passthrough: Passthrough,
    kept: StoredResponses,
    max_body_bytes: int,
) -> web.Application:
    """What clients and load balancers ask, beside the token path."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[answer_errors])
    app[_POOL] = pool
    app.router.add_get("/health", admin.health)
    passthrough.add_routes(app)
    kept.add_routes(app)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{model:.+}", _model)
    return app


def complete(
    pool: WorkerRegistry,
    admin: Admin,
    operations: Operations,
    passthrough: Passthrough,
    kept: StoredResponses,
    membership: Membership | None,
    admin_token: str,
    peers: Peers | None,
    max_body_bytes: int,
) -> web.Application:
    """That, and all that operators and workers ask."""
    app = public(pool, admin, passthrough, kept, max_body_bytes)
    app[_GUARD] = Guard(admin_token, peers, _OPEN)
    app.middlewares.append(_only_operators)
    admin.add_routes(app)
    Dashboard(admin).add_routes(app)
    operations.add_routes(app)
    kept.add_peer_routes(app)
    if membership is not None:
        membership.add_routes(app)
    return app


def lobby(membership: Membership | None) -> web.Application:
    """What is served until there is a worker of each role: only they are let in.

    Args:
        membership: None: they cannot announce themselves.
    """

    async def refuse(request: web.Request) -> web.Response:
        told = ErrorAnswer(503, "there is no worker of each role yet", "worker_error")
        return _response(told)

    app = web.Application(middlewares=[answer_errors])
    if membership is not None:
        membership.add_routes(app)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app


def refuse(refusal: Refusal) -> bytes:
    return ErrorAnswer(refusal.status, refusal.message).body


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": _cards(request)})


async def _model(request: web.Request) -> web.Response:
    wanted = request.match_info["model"]
    for card in _cards(request):
        if card["id"] == wanted:
            return web.json_response(card)
    known = ", ".join(str(card["id"]) for card in _cards(request))
    message = f"the model {wanted!r} does not exist; available: {known}"
    return _response(ErrorAnswer(404, message, param="model", code="model_not_found"))


def _cards(request: web.Request) -> list[dict[str, object]]:
    handshake = request.app[_POOL].first
    return [
        {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "max_model_len": handshake.max_model_tokens,
        }
        for model in handshake.models
    ]


@web.middleware
async def _only_operators(request: web.Request, handler: _Handler) -> web.StreamResponse:
    request.app[_GUARD].check(request)
    return await handler(request)


@web.middleware
async def answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error as OpenAI's error object."""
    where = f"{request.method} {request.path}"
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _response(ErrorAnswer(405, f"{where}: use {allowed}"))
    except web.HTTPNotFound:
        served = {r.canonical for r in request.app.router.resources()} | set(PATHS)
        told = f"no such path: {request.path}; there are {', '.join(sorted(served))}"
        return _response(ErrorAnswer(404, told))
    except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
        return _response(answer_to(error, where))


def _response(told: ErrorAnswer) -> web.Response:
    return web.Response(
        status=told.status,
        body=told.body,
        content_type="application/json",
        headers=told.headers,
    )
