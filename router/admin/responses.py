"""JSON responses of the aiohttp applications."""

from __future__ import annotations

import msgspec
from aiohttp import web


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a response with a structure, or a list of structures, as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
