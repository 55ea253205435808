"""The aiohttp applications, which serve all paths but the token path.

Their error responses have OpenAI's format too, and that of the Messages API on its own path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

from ppd.announcement import PATH as ANNOUNCEMENTS

from ..answers import ErrorAnswer, answer_to
from ..apis.front import PATHS
from ..apis.messages_errors import error_body as messages_error
from ..apis.passthrough import COUNT_TOKENS, PASSED_ON, Passthrough
from ..apis.response_store import BY_NAME, PEER_PATH, StoredResponses
from ..intake.catalog import Catalog
from ..peers import Peers
from ..wire.request import Refusal
from ..workers.membership import Membership
from .admin import Admin
from .dashboard import PAGE, Dashboard
from .endpoints import LIVE, OPENAPI_PATH
from .guard import Guard
from .models import Models
from .openapi import OpenApi
from .operations import Operations

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GUARD = web.AppKey("guard", Guard)

# Announcements carry a token of their own, requests of peers a secret.
_OPEN = (
    "GET /health",
    f"GET {LIVE}",
    "GET /metrics",
    f"GET {OPENAPI_PATH}",
    "GET /v1/models",
    "GET /v1/models/{model}",
    f"POST {ANNOUNCEMENTS}",
    *(f"GET {path}" for path in PAGE),
    *(f"POST {path}" for path in PASSED_ON),
    *(f"{method} {path}" for path in (BY_NAME, PEER_PATH) for method in ("GET", "DELETE")),
)


def public_app(
    catalog: Catalog,
    admin: Admin,
    passthrough: Passthrough,
    kept: StoredResponses,
    max_body_bytes: int,
    token_paths: Collection[str] = PATHS,
) -> web.Application:
    """Return the application for clients and load balancers.

    On the same port the token path serves ``token_paths``.
    """
    app = web.Application(client_max_size=max_body_bytes, middlewares=[answer_errors])
    app.router.add_get("/health", admin.health)
    app.router.add_get(LIVE, _live)
    passthrough.add_routes(app)
    kept.add_routes(app)
    Models(catalog).add_routes(app)
    OpenApi(app, token_paths).add_routes()
    return app


def admin_app(
    catalog: Catalog,
    admin: Admin,
    operations: Operations,
    passthrough: Passthrough,
    kept: StoredResponses,
    membership: Membership | None,
    admin_token: str,
    peers: Peers | None,
    max_body_bytes: int,
    token_paths: Collection[str] = PATHS,
) -> web.Application:
    """Return the application for clients, operators and workers.

    On the same port the token path serves ``token_paths``.
    """
    app = public_app(catalog, admin, passthrough, kept, max_body_bytes, token_paths)
    app[_GUARD] = Guard(admin_token, peers, _OPEN)
    app.middlewares.append(_only_operators)
    admin.add_routes(app)
    Dashboard(admin).add_routes(app)
    operations.add_routes(app)
    kept.add_peer_routes(app)
    if membership is not None:
        membership.add_routes(app)
    return app


def startup_app(membership: Membership | None) -> web.Application:
    """Return the application until there is a worker of each role.

    It serves announcements of workers and ``/live``, and refuses all other requests by a 503.

    Args:
        membership: of workers that announce themselves; None: no worker may.
    """

    async def refuse(request: web.Request) -> web.Response:
        return _response(ErrorAnswer(503, "there is no worker of each role yet", "worker_error"))

    app = web.Application(middlewares=[answer_errors])
    if membership is not None:
        membership.add_routes(app)
    app.router.add_get(LIVE, _live)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app


async def _live(_request: web.Request) -> web.Response:
    """Answer for as long as the process serves, whatever its workers do."""
    return web.Response(text="alive\n")


def refuse(refusal: Refusal) -> bytes:
    """Return the body of a refusal, an OpenAI error object."""
    return ErrorAnswer(refusal.status, refusal.message).body


@web.middleware
async def _only_operators(request: web.Request, handler: _Handler) -> web.StreamResponse:
    request.app[_GUARD].check(request)
    return await handler(request)


@web.middleware
async def answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn every error into a response with an error object of the API (middleware)."""
    where = f"{request.method} {request.path}"
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _response(ErrorAnswer(405, f"{where}: use {allowed}"))
    except web.HTTPNotFound:
        served = {r.canonical for r in request.app.router.resources()} | set(PATHS)
        message = f"no such path: {request.path}; there are {', '.join(sorted(served))}"
        return _response(ErrorAnswer(404, message))
    except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the connection
        answer = answer_to(error, where)
        if request.path != COUNT_TOKENS:
            return _response(answer)
        body = messages_error(answer.status, answer.message)
        return _response(answer, body)


def _response(error: ErrorAnswer, body: bytes | None = None) -> web.Response:
    return web.Response(
        status=error.status,
        body=error.body if body is None else body,
        content_type="application/json",
        headers=error.headers,
    )
