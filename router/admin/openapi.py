"""``/openapi.json``: the description of an application's routes, made from the router's own types.

It holds no state of the router, so any client may read it, as ``/health`` and ``/metrics``. It is
made once, before the application is served.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from ppd import __version__
from ppd.decision import Reason, Route

from ..answers import ErrorBody
from ..config.retrieval import RetrievalOptions
from ..intake.objectives import TARGET_HEADERS, WEIGHT_HEADERS
from ..peers import PEER_HEADER
from .docstrings import attributes_of, description_of
from .endpoints import OPENAPI_PATH, OPERATIONS, Access, Operation, Tag

Json = dict[str, Any]

_TEMPLATE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
# A request's object may leave out what its tenant's or model's default has.
_COMPLETED_BY_DEFAULTS = (RetrievalOptions,)

_DESCRIPTION = """\
Every route of this port. A route of `GET` also takes `HEAD`.

A request that is no generation closes its connection after the response.
Streams are server-sent events; the last one is `[DONE]`.
A stream that breaks off ends with an event that has an error object."""

_ROUTE_HEADERS = {
    "X-PPD-Route": ("The route that the turn took.", [route.value for route in Route]),
    "X-PPD-Reason": ("The reason of that route.", [reason.value for reason in Reason]),
    "X-PPD-Turn": ("Number of the turn in its conversation, from 1.", None),
}
_OBJECTIVE_HEADERS = {
    WEIGHT_HEADERS["ttft"]: "Weight of TTFT for this request.",
    WEIGHT_HEADERS["tpot"]: "Weight of TPOT for this request.",
    WEIGHT_HEADERS["throughput"]: "Weight of throughput for this request.",
    TARGET_HEADERS["ttft_ms"]: "Target of TTFT for this request, in milliseconds.",
    TARGET_HEADERS["tpot_ms"]: "Target of TPOT for this request, in milliseconds.",
}
_SESSION_HEADER = {
    "name": "X-Session-ID",
    "in": "header",
    "description": "Names the conversation for the choice of a worker.",
    "schema": {"type": "string"},
}
_SCHEMES: dict[str, Json] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A client's API key; needed if the router's file has keys.",
    },
    "xApiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "The same key, as Anthropic's clients send it.",
    },
    "adminToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The operators' token. Without one in the configuration, any client may "
        "read, and clients on the router's own host may change anything.",
    },
    "workerToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The workers' secret. Without one in the configuration, only workers on "
        "the router's own host may announce themselves.",
    },
    "peer": {
        "type": "apiKey",
        "in": "header",
        "name": PEER_HEADER,
        "description": "The secret that the router processes on one port share.",
    },
}
# A requirement without a scheme: the request may come without any.
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {
    Access.OPEN: [],
    Access.CLIENT: [{"key": []}, {"xApiKey": []}, {}],
    Access.OPERATOR: [{"adminToken": []}, {"peer": []}, {}],
    Access.WORKER: [{"workerToken": []}, {}],
    Access.PEER: [{"peer": []}],
}


class OpenApi:
    """The route of the document.

    Args:
        app: the application whose routes it describes.
        token_paths: paths of the token path that are served on the same port.
    """

    def __init__(self, app: web.Application, token_paths: Collection[str]) -> None:
        self._app = app
        self._token_paths = token_paths
        self._body = b""

    def add_routes(self) -> None:
        """Add the route to the application."""
        self._app.router.add_get(OPENAPI_PATH, self.show)
        self._app.on_startup.append(self._make)  # when all routes have been added

    async def show(self, request: web.Request) -> web.Response:
        """Return the document."""
        return web.Response(body=self._body, content_type="application/json")

    async def _make(self, app: web.Application) -> None:
        self._body = msgspec.json.encode(document(routes_of(app, self._token_paths)))


def routes_of(app: web.Application, token_paths: Collection[str]) -> list[str]:
    """Return all routes of a port as ``METHOD PATH``, without ``HEAD``.

    Args:
        app: the application.
        token_paths: paths of the token path that are served on the same port.
    """
    found = [f"POST {path}" for path in token_paths]
    for route in app.router.routes():
        assert route.resource is not None, "every route is added with a path"
        if route.method != "HEAD":
            found.append(f"{route.method} {route.resource.canonical}")
    return found


def document(routes: Iterable[str]) -> Json:
    """Return the document of these routes, as OpenAPI 3.1 defines it.

    Args:
        routes: as ``METHOD PATH``; each has a description in ``endpoints.py``.
    """
    described = {route: OPERATIONS[route] for route in sorted(routes, key=_by_path)}
    schemas, components = _schemas(described.values())
    paths: Json = {}
    for route, operation in described.items():
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(route, operation, schemas)
    tags = {operation.tag for operation in described.values()}
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "sglang-ppd router",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag, "description": tag.description} for tag in Tag if tag in tags],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
    }
    plain: Json = msgspec.json.decode(msgspec.json.encode(made))
    return plain


def _by_path(route: str) -> tuple[str, str]:
    method, path = route.split(" ")
    return path, method


# -- operations -------------------------------------------------------------------------------


def _operation(route: str, operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    described: Json = {
        "operationId": re.sub(r"\W+", "_", route).strip("_").lower(),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(route, operation, schemas),
        "security": _SECURITY[operation.access],
    }
    if operation.source:
        described["externalDocs"] = {"url": operation.source}
    if parameters := list(_parameters(route, operation)):
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.body]}},
        }
    return described


def _parameters(route: str, operation: Operation) -> Iterator[Json]:
    for name in _PATH_PARAMETER.findall(route):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, description in operation.query:
        yield {
            "name": name,
            "in": "query",
            "description": description,
            "required": operation.required_query,
            "schema": {"type": "string"},
        }
    if operation.routed:
        for name, description in _OBJECTIVE_HEADERS.items():
            number = {"type": "number"}
            yield {"name": name, "in": "header", "description": description, "schema": number}
        yield _SESSION_HEADER


def _responses(route: str, operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    content = {operation.media: {"schema": schemas[operation.answer]}}
    success: Json = {"description": "Success.", "content": content}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if operation.routed:
        success["headers"] = {
            name: {
                "description": description,
                "schema": {"type": "integer"} if values is None else {"enum": values},
            }
            for name, (description, values) in _ROUTE_HEADERS.items()
        }
    responses: Json = {"200": success}
    if operation.unhealthy:
        responses["503"] = {"description": "It is not healthy.", "content": content}
    body = {"application/json": {"schema": schemas[operation.error or ErrorBody]}}
    if operation.access is Access.CLIENT:
        responses["429"] = {
            "description": "Too many requests.",
            "headers": {
                "Retry-After": {
                    "description": "Seconds after which a retry may succeed.",
                    "schema": {"type": "integer"},
                }
            },
            "content": body,
        }
    if operation.access is not Access.OPEN or _PATH_PARAMETER.search(route):
        responses["4XX"] = {"description": "The request is wrong, or not allowed.", "content": body}
    responses["5XX"] = {"description": "A worker or the router has failed.", "content": body}
    return responses


# -- schemas ----------------------------------------------------------------------------------


def _schemas(operations: Collection[Operation]) -> tuple[dict[Any, Json], Json]:
    """Return the schema of every type of the operations, and the components that they name.

    A type of a compiled module has no annotations, so its schema is empty: anything.
    """
    types = [
        kind
        for operation in operations
        for kind in (operation.body, operation.answer, operation.error, ErrorBody)
        if kind is not None
    ]
    known = [kind for kind in types if _has_schema(kind)]
    schemas, components = msgspec.json.schema_components(known, ref_template=_TEMPLATE)
    classes = {one.__name__: one for kind in known for one in _classes(kind)}
    for name, component in components.items():
        _describe(component, classes[name])
    empty: dict[Any, Json] = {kind: {} for kind in types}
    return empty | dict(zip(known, schemas, strict=True)), components


def _has_schema(kind: Any) -> bool:
    """Whether msgspec can describe a type; a field of a compiled class has the type ``type``."""
    try:
        msgspec.json.schema(kind)
    except TypeError:
        return False
    return True


def _classes(kind: Any) -> Iterator[type]:
    """Yield the classes of a type and of all that it consists of."""
    pending: list[Any] = [msgspec.inspect.type_info(kind)]
    seen: set[type] = set()
    while pending:
        info = pending.pop()
        if (found := getattr(info, "cls", None)) is not None:
            if found in seen:
                continue
            seen.add(found)
            yield found
        for name in getattr(info, "__struct_fields__", ()):
            value = getattr(info, name)
            parts = value if isinstance(value, tuple) else (value,)
            pending += [p for p in parts if isinstance(p, msgspec.Struct)]


def _describe(component: Json, kind: type) -> None:
    """Replace the docstrings in a component by the descriptions of its parts."""
    component["description"] = description_of(kind)
    if issubclass(kind, Reason):
        component["description"] += "".join(f"\n- `{r}`: {r.description}" for r in Reason)
    descriptions = attributes_of(kind)
    for name, schema in component.get("properties", {}).items():
        if name in descriptions:
            schema["description"] = descriptions[name]
    if kind in _COMPLETED_BY_DEFAULTS:
        component.pop("required", None)
