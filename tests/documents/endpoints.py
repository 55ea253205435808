"""The page of endpoints, from the document that the router serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.admin.endpoints import OPERATIONS
from router.admin.openapi import document

from .tables import code, sentence, table

_INTRODUCTION = """\
# Endpoints

`GET /openapi.json` describes the endpoints of the port that it is sent to, as OpenAPI 3.1.
Any client may read it, as `/health` and `/metrics`, because it holds no state of the router.
With an `admin_port`, the public port lists the clients' endpoints only.

"""
_ERRORS = """\
## Errors

An error has the body [ErrorBody](#errorbody).
An error of `/v1/messages` has the body [MessagesErrorBody](#messageserrorbody).
A response of status 429 has `Retry-After`, in seconds.
An error of a request that was sent a second time has `X-PPD-Retried: 1`.
"""
_REQUIREMENTS = {
    "key": "client's key",
    "adminToken": "admin token, if one is set",
    "workerToken": "worker token",
    "peer": "secret of the processes",
}


def page() -> str:
    """The page, in Markdown."""
    described = document(OPERATIONS)
    return _INTRODUCTION + "\n".join(
        [*_groups(described), *_headers(described), _ERRORS, *_structures(described)]
    )


def _groups(described: Mapping[str, Any]) -> Iterator[str]:
    for tag in described["tags"]:
        rows = [
            (
                code(f"{method.upper()} {path}"),
                _access(one),
                _body(one),
                _answer(one),
                one["summary"],
            )
            for path, item in described["paths"].items()
            for method, one in item.items()
            if tag["name"] in one["tags"]
        ]
        yield f"## {tag['name'].capitalize()}\n\n{tag['description']}\n"
        yield table(("endpoint", "access", "request", "response", "what it does"), rows)


def _access(operation: Mapping[str, Any]) -> str:
    """What a request must carry, where the router's file asks for it."""
    named = [_REQUIREMENTS.get(scheme) for one in operation["security"] for scheme in one]
    return " or ".join(filter(None, named)) or "any"


def _body(operation: Mapping[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return ", ".join(_type(one["schema"]) for one in content.values())


def _answer(operation: Mapping[str, Any]) -> str:
    content = operation["responses"]["200"]["content"]
    kinds = [
        _type(one["schema"]) if media == "application/json" else code(media)
        for media, one in content.items()
    ]
    return " or ".join(kinds)


def _headers(described: Mapping[str, Any]) -> Iterator[str]:
    chat = described["paths"]["/v1/chat/completions"]["post"]
    yield "## Headers\n\nRequests for replies may carry these headers.\n"
    given = [one for one in chat["parameters"] if one["in"] == "header"]
    yield table(("header", "meaning"), ((code(h["name"]), h["description"]) for h in given))
    yield "The answers have these.\n"
    answered = chat["responses"]["200"]["headers"]
    yield table(
        ("header", "meaning"), ((code(name), h["description"]) for name, h in answered.items())
    )


def _structures(described: Mapping[str, Any]) -> Iterator[str]:
    yield "## Structures\n"
    for name, schema in sorted(described["components"]["schemas"].items()):
        yield f"### {name}\n\n{schema['description']}\n"
        required = schema.get("required", ())
        rows = [
            (
                code(field),
                _type(one),
                "yes" if field in required else "",
                sentence(one.get("description", "")),
            )
            for field, one in schema.get("properties", {}).items()
        ]
        if rows:
            yield table(("field", "type", "required", "meaning"), rows)
        elif "enum" in schema and "\n- " not in schema["description"]:
            yield f"One of {', '.join(map(code, schema['enum']))}.\n"


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(code, schema["enum"]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return str(kind or "any")
