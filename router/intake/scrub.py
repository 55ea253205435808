"""Removes routing fields from a client's request, and keeps tenants apart on the workers."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from ppd.contract import STRIPPED_CUSTOM_PARAMS, STRIPPED_FIELDS

from .fields import sampling_of, typed

# The only client headers that are forwarded: engines obey others (x-override-*,
# x-data-parallel-rank, x-smg-routing-key).
FORWARDED_HEADERS = ("authorization", "x-request-id", "traceparent", "tracestate", "baggage")


ANONYMOUS = "anonymous"  # the tenant of all requests without a key


def tenant_of(authorization: str | None) -> str:
    """A name for the holder of a key, which does not reveal the key; "" without one."""
    if not authorization:
        return ""
    key = authorization.encode(errors="surrogateescape")
    return hashlib.blake2b(key, digest_size=8, person=b"ppd-tenant").hexdigest()


def without_routing(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``body`` without fields that aim KV transfers or mark local turns."""
    if STRIPPED_FIELDS.isdisjoint(body):
        body = body.copy()
    else:
        body = {name: value for name, value in body.items() if name not in STRIPPED_FIELDS}
    if body.get("model", "") is None:  # SGLang wants a name or nothing
        del body["model"]
    match body.get("sampling_params"):
        case None:
            pass
        case list():
            body["sampling_params"] = [_without_marks(one) for one in sampling_of(body)]
        case _:
            body["sampling_params"] = _without_marks(sampling_of(body)[0])
    return _without_marks(body)


def _without_marks(params: dict[str, Any]) -> dict[str, Any]:
    if "custom_params" not in params:
        return params
    custom = typed(params, "custom_params", dict, {})
    if not STRIPPED_CUSTOM_PARAMS & custom.keys():
        return params
    kept = {name: value for name, value in custom.items() if name not in STRIPPED_CUSTOM_PARAMS}
    return {**params, "custom_params": kept or None}


def isolate(body: dict[str, Any], tenant: str) -> None:
    """Prefix cache salt and request ids with the tenant's name; no key is one tenant, too.

    Names contain no slash, so no value of one tenant equals another's. SGLang aborts all requests
    whose id begins with the one that is aborted, so every id ends in a slash.
    """
    name = _quoted(tenant or ANONYMOUS)
    salt = body.get("cache_salt")
    if isinstance(salt, list):
        body["cache_salt"] = [f"{name}/{one or ''}" for one in salt]
    elif salt or tenant:
        body["cache_salt"] = f"{name}/{salt}" if salt else name
    rid = body.get("rid")
    if isinstance(rid, list):
        body["rid"] = [f"{name}/{one}/" for one in rid]
    elif rid is not None:
        body["rid"] = f"{name}/{rid}/"


@lru_cache(maxsize=1024)
def _quoted(tenant: str) -> str:
    return quote(tenant, safe="")
