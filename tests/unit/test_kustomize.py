"""The kustomize overlay: workers that exist get the plugin, and the router finds them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from ppd.contract import Role
from router.config.file import read_config
from sglang_patches.settings import read_settings
from sglang_patches.worker import plan_launch

from .kubernetes import documents as rendered
from .kubernetes.documents import InvalidDocumentError, check, named, variables
from .kubernetes.sources import router_endpoints, sglang_endpoints
from .kubernetes.tools import ROOT, Document, Tools

FOLDER = ROOT / "deploy/kustomize"
# Of ppd-worker's flags, what its users may leave out.
OPTIONAL = {"--chunked-prefill-size"}
# One mistake in each file.
MISTAKES = {
    "router/deployment.yaml": ("enableServiceLinks", "serviceLinks"),
    "router/rbac.yaml": ("resources: [pods]", "resource: [pods]"),
    "router/service.yaml": ("sessionAffinity", "affinity"),
    "plugin/prefill.yaml": ("spec/enableServiceLinks", "spec/serviceLinks"),
    "plugin/decode-group.yaml": ("spec/enableServiceLinks", "spec/serviceLinks"),
}


@pytest.fixture(scope="module")
def documents(tools: Tools) -> list[Document]:
    """The example of a cluster with workers."""
    return tools.kustomize(FOLDER / "example")


@pytest.fixture(scope="module")
def swapped(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """The same, but prefill is a group and decode a StatefulSet."""
    folder = tmp_path_factory.mktemp("swapped") / "kustomize"
    shutil.copytree(FOLDER, folder)
    path = folder / "example/existing.yaml"
    prefill, decode = yaml.safe_load_all(path.read_text())
    for workload, role in ((prefill, "decode"), (decode, "prefill")):
        workload["metadata"]["labels"]["app.kubernetes.io/component"] = role
    prefill |= {"kind": "StatefulSet"}
    prefill["spec"]["serviceName"] = "sglang"
    path.write_text(yaml.safe_dump_all([prefill, decode]))
    return tools.kustomize(folder / "example")


@pytest.fixture(params=["documents", "swapped"])
def either(request: pytest.FixtureRequest) -> list[Document]:
    """Both of them."""
    documents: list[Document] = request.getfixturevalue(request.param)
    return documents


def test_a_cluster_accepts_every_document(either: list[Document]) -> None:
    check(either)
    names = {document["metadata"]["namespace"] for document in either}
    assert names == {"models"}


def test_workers_get_the_plugin_and_its_flags(either: list[Document]) -> None:
    found = set()
    for document in either:
        for template in rendered.templates(document):
            container = template["spec"]["containers"][0]
            if container["name"] != "sglang":
                continue
            role = Role(document["metadata"]["labels"]["app.kubernetes.io/component"])
            settings = read_settings({k: v or "" for k, v in variables(container).items()})
            assert settings is not None, "PPD_ENABLE is 1"
            assert template["spec"]["enableServiceLinks"] is False
            assert "/sglang-ppd/worker:" in container["image"]
            given = {part.partition("=")[0] for part in container["args"]}
            launch = plan_launch(role, [], cpu=False, environment={}).argv
            needed = {part for part in launch if part.startswith("--")}
            assert needed - OPTIONAL <= given
            found.add(role)
    assert found == {Role.PREFILL, Role.DECODE}


def test_the_router_finds_the_workers(either: list[Document], tmp_path: Path) -> None:
    (content,) = (
        document["data"]["router.toml"] for document in either if document["kind"] == "ConfigMap"
    )
    path = tmp_path / "router.toml"
    path.write_text(content)
    config = read_config(str(path), {})
    config.check()
    found = rendered.found_by(config, either)
    assert {role: len(urls) for role, urls in found.items()} == {Role.PREFILL: 1, Role.DECODE: 1}
    deployment = named(either, "Deployment", "-router")
    assert config.kubernetes is not None
    assert deployment["metadata"]["namespace"] == config.kubernetes.namespace
    template = deployment["spec"]["template"]["spec"]
    ports = {p["name"]: p["containerPort"] for p in template["containers"][0]["ports"]}
    assert ports == {"api": config.port, "operators": config.admin_port}
    least = config.shutdown_delay_s + config.shutdown_grace_s + 5
    assert template["terminationGracePeriodSeconds"] > least


def test_probes_ask_for_endpoints_that_exist(either: list[Document]) -> None:
    served = {"router": router_endpoints(), "sglang": sglang_endpoints()}
    for container in rendered.containers(either):
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        for probe in probes:
            assert probe["httpGet"]["path"] in served[container["name"]]


def test_the_router_is_that_of_the_chart(tools: Tools, documents: list[Document]) -> None:
    ours = named(documents, "Deployment", "-router")["spec"]["template"]["spec"]["containers"][0]
    chart = named(tools.render({}), "Deployment", "-router")["spec"]["template"]["spec"]
    fields = ("command", "args", "ports", "resources", "securityContext", "volumeMounts")
    for field in (*fields, "livenessProbe", "readinessProbe"):
        assert _without_scheme(chart["containers"][0][field]) == ours[field], field


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(tools: Tools, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "kustomize"
    shutil.copytree(FOLDER, folder)
    right, wrong = MISTAKES[name]
    path = folder / name
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    documents = tools.kustomize(folder / "example")
    with pytest.raises(InvalidDocumentError):
        check(documents)


def test_a_worker_without_env_is_an_error_and_not_left_out(tools: Tools, tmp_path: Path) -> None:
    folder = tmp_path / "kustomize"
    shutil.copytree(FOLDER, folder)
    path = folder / "example/existing.yaml"
    path.write_text(path.read_text().replace("            env: []\n", ""))
    done = tools.kubectl("kustomize", str(folder / "example"))
    assert done.returncode != 0
    assert "env" in done.stderr


def _without_scheme(value: Document) -> Document:
    """A probe without the scheme that the chart names and that is the default."""
    if isinstance(value, dict) and "httpGet" in value:
        http = {key: part for key, part in value["httpGet"].items() if key != "scheme"}
        return {**value, "httpGet": http}
    return value
