"""Rendered documents: their pods, and the checks that every one of them must pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec

from ppd.contract import Role
from router.config.file import read_config
from router.config.options import RouterConfig
from router.pool.config import PoolConfig
from router.pool.config import read_config as read_pool_config
from router.workers.pods import Pod

from .crds import SCHEMAS
from .tools import KUBERNETES, Document


class InvalidDocumentError(Exception):
    """A document that a cluster would refuse, or of which it would ignore a field."""


def check(documents: Iterable[Document]) -> None:
    """Check documents, with the pods in them.

    Raises:
        InvalidDocumentError: naming the first fault.
    """
    for document in documents:
        _check_once(json.dumps(document, sort_keys=True))


@cache
def _check_once(text: str) -> None:
    document = json.loads(text)
    kind = document.get("kind")
    try:
        if kind in SCHEMAS:
            jsonschema.validate(document, SCHEMAS[kind], jsonschema.Draft202012Validator)
            for template in templates(document):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        raise InvalidDocumentError(f"{kind}: {error.message}") from error
    except (kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        raise InvalidDocumentError(f"{kind}: there is no such object ({error})") from error


def of_kind(documents: Iterable[Document], kind: str) -> list[Document]:
    """Return the documents of a kind."""
    return [document for document in documents if document["kind"] == kind]


def named(documents: Iterable[Document], kind: str, suffix: str) -> Document:
    """Return the one document of a kind whose name ends so."""
    (found,) = (d for d in of_kind(documents, kind) if d["metadata"]["name"].endswith(suffix))
    return found


def templates(document: Document) -> Iterator[Document]:
    """Yield the pod templates of a workload."""
    match document["kind"]:
        case "Deployment" | "StatefulSet":
            yield document["spec"]["template"]
        case "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            yield group["leaderTemplate"]
            yield group["workerTemplate"]


def all_templates(documents: Iterable[Document]) -> list[Document]:
    """Return the pod templates of all workloads."""
    return [template for document in documents for template in templates(document)]


def containers(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the containers of all pods, also those that run before the others."""
    for template in all_templates(documents):
        yield from template["spec"].get("initContainers", ())
        yield from template["spec"]["containers"]


def component_of(template: Document) -> str:
    """Return the component that a pod belongs to."""
    component: str = template["metadata"]["labels"]["app.kubernetes.io/component"]
    return component


def pod_of(template: Document, address: str) -> Document:
    """Return a Ready pod of a template, as the cluster's API would send it."""
    return {
        "metadata": {"name": f"pod-{address}", "uid": address, **template["metadata"]},
        "spec": template["spec"],
        "status": {"podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def is_selected(template: Document, selector: str) -> bool:
    """Whether a pod has the labels of an equality selector (``a=b,c=d``)."""
    wanted = dict(part.split("=", 1) for part in selector.split(","))
    labels: dict[str, str] = template["metadata"]["labels"]
    return wanted.items() <= labels.items()


def found_by(config: RouterConfig, documents: Iterable[Document]) -> dict[Role, list[str]]:
    """Return the URLs of the workers that a router finds among the pods, by role.

    Pod number n has the address 10.0.0.n.
    """
    options = config.kubernetes
    assert options is not None, "the router watches pods"
    found: dict[Role, list[str]] = {}
    for number, template in enumerate(all_templates(documents)):
        for role in Role:
            selector = options.selector(role)
            if selector and is_selected(template, selector):
                content = json.dumps(pod_of(template, f"10.0.0.{number}"))
                pod = msgspec.json.decode(content, type=Pod)
                assert pod.ready
                url = pod.url(options.port)
                assert url is not None, f"{role} pods have no port {options.port}"
                found.setdefault(role, []).append(url)
    return found


def router_config(documents: Iterable[Document], folder: Path) -> RouterConfig:
    """Return the rendered configuration, read and checked as the router does."""
    config = read_config(_written(documents, "router", folder), {})
    config.check()
    return config


def pool_config(documents: Iterable[Document], folder: Path) -> PoolConfig:
    """Return the pool's rendered configuration, as the pool reads it."""
    return read_pool_config(_written(documents, "pool", folder), {})


def _written(documents: Iterable[Document], name: str, folder: Path) -> str:
    path = folder / f"{name}.toml"
    path.write_text(named(documents, "ConfigMap", f"-{name}")["data"][f"{name}.toml"])
    return str(path)


def arguments(container: Document) -> dict[str, str]:
    """Return the flags of a container's command, with the values that follow them."""
    given: dict[str, str] = {}
    flag = ""
    for part in container.get("args", ()):
        if part.startswith("--"):
            flag = part
            given[flag] = ""
        elif flag:
            given[flag] = part
    return given


def variables(container: Document) -> dict[str, Any]:
    """Return the variables of a container, by name."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}
