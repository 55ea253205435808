"""The options of router and pool in the schema of the Helm chart's values, made from types."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ppd.policies import NAMES
from router.config.options import TABLE_POLICY, RouterConfig
from router.pool.config import PoolConfig

SCHEMA = Path("deploy/helm/sglang-ppd/values.schema.json")
# Options that the chart sets itself, that are secrets, or that need what its pods do not have:
# further processes, a writable folder, a GPU.
OWN = {
    "RouterOptions": {
        *("host", "port", "admin_host", "admin_port", "processes", "kubernetes", "workers_file"),
        *("accept_workers", "heartbeat_budget_s", "worker_networks", "decision_log", "table"),
        *("admin_token", "worker_token", "worker_api_key", "tls_certificate", "tls_key"),
    },
    "PoolOptions": {"data", "host", "port", "shards", "device"},
    "Milvus": {"token"},
    "Chroma": {"token"},
    "SharedConfig": {"password", "responses_key"},
}
_ROOTS: dict[str, type] = {"RouterOptions": RouterConfig, "PoolOptions": PoolConfig}
_LEFT_OUT = ("title", "description", "default")  # docs/reference/options.md has them


def definitions() -> dict[str, Any]:
    """Return the schemas of all options, by name; unknown names are refused in each."""
    made: dict[str, Any] = {}
    for root, kind in _ROOTS.items():
        found = msgspec.json.schema(kind)["$defs"]
        found[root] = found.pop(kind.__name__)
        made |= {name: _strict(schema) for name, schema in found.items()}
    for tagged in ("Weights", "Targets"):  # a tag of the journal's rows, not of the file
        made[tagged]["properties"] = _without(made[tagged]["properties"], {"type"})
        made[tagged]["required"].remove("type")
    for name, owned in OWN.items():
        made[name]["properties"] = _without(made[name]["properties"], owned)
    names = "|".join([TABLE_POLICY, *NAMES])
    pattern = names.replace("SHARE", r"[0-9]*\.?[0-9]+").replace("TOKENS", "[0-9]{1,9}")
    made["RouterOptions"]["properties"]["policy"] = {"type": "string", "pattern": f"^({pattern})$"}
    needed = {name for root in _ROOTS for name in _reached(made, root)}
    return {name: made[name] for name in sorted(needed)}


def problems(root: Path) -> Iterator[str]:
    """Yield a message if the schema's options are not those of the code."""
    path = root / SCHEMA
    if path.read_text() != _with_definitions(path):
        yield f"{SCHEMA}: its options differ from the code; run make reference"


def write(root: Path) -> None:
    """Write the options into the schema; its other parts stay."""
    path = root / SCHEMA
    path.write_text(_with_definitions(path))


def _with_definitions(path: Path) -> str:
    schema = json.loads(path.read_text())
    own = {name: made for name, made in schema["$defs"].items() if not made.get("$comment")}
    note = {"$comment": "Made from the code by `make reference`."}
    schema["$defs"] = own | {name: note | made for name, made in definitions().items()}
    return json.dumps(schema, indent=2) + "\n"


def _strict(schema: Any) -> Any:
    """Return a schema without descriptions, whose objects refuse unknown properties."""
    match schema:
        case dict():
            kept = {
                key: {name: _strict(inner) for name, inner in value.items()}
                if key == "properties"
                else _strict(value)
                for key, value in schema.items()
                if key not in _LEFT_OUT
            }
            return kept | ({"additionalProperties": False} if "properties" in kept else {})
        case list():
            return [_strict(inner) for inner in schema]
        case _:
            return schema


def _without(properties: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the properties but the named ones, all of which must exist."""
    assert set(names) <= set(properties), set(names) - set(properties)
    return {name: schema for name, schema in properties.items() if name not in names}


def _reached(schemas: Mapping[str, Any], name: str) -> set[str]:
    """Return the names of a schema and of all that it refers to."""
    found, pending = {name}, [name]
    while pending:
        text = json.dumps(schemas[pending.pop()])
        further = {other for other in schemas if f'"#/$defs/{other}"' in text} - found
        found |= further
        pending += further
    return found
