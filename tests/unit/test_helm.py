"""The Helm chart: it is linted, and what it renders is what a cluster accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppd import __version__
from ppd.errors import ConfigError

from .kubernetes import documents as rendered
from .kubernetes.documents import InvalidDocumentError, check, of_kind
from .kubernetes.tools import CHART, NAMESPACE, Document, MissingToolError, Tools
from .kubernetes.values import EVERYTHING, MATRIX, REFUSED, Values

# One mistake in each template: a misspelt field, or a value that the reader of it refuses.
MISTAKES: dict[str, tuple[str, str]] = {
    "_autoscaling.tpl": ("stabilizationWindowSeconds", "stabilisationWindowSeconds"),
    "_names.tpl": ("secretKeyRef", "secretRef"),
    "_router-config.tpl": ('"admin_port"', '"admn_port"'),
    "_toml.tpl": ('{{ include "ppd.tomlKey" $key }} =', '{{ include "ppd.tomlKey" $key }}:'),
    "_worker.tpl": ("terminationGracePeriodSeconds", "terminationGraceSeconds"),
    "disruption.yaml": ("maxUnavailable", "maxUnavailble"),
    "hpa.yaml": ("averageUtilization", "averageUtilisation"),
    "keda.yaml": ("maxReplicaCount", "maxReplicas"),
    "networkpolicy.yaml": ("policyTypes", "policyType"),
    "podmonitor.yaml": ("podMetricsEndpoints", "endpoints"),
    "pool.yaml": ("volumeClaimTemplates", "volumeClaims"),
    "router-configmap.yaml": ("data:", "datas:"),
    "router-deployment.yaml": ("enableServiceLinks: false", 'enableServiceLinks: "false"'),
    "router-rbac.yaml": ("apiGroups", "apiGroup"),
    "router-service.yaml": ("sessionAffinity:", "sessionAfinity:"),
    "secret.yaml": ("stringData", "stringdata"),
    "worker-deployments.yaml": ("progressDeadlineSeconds", "progressDeadline"),
    "worker-groups.yaml": ("startupPolicy", "startPolicy"),
}


@pytest.fixture(params=MATRIX)
def values(request: pytest.FixtureRequest) -> Values:
    """One set of values."""
    return MATRIX[request.param]


@pytest.fixture
def documents(tools: Tools, values: Values) -> list[Document]:
    """What the chart renders with these values."""
    return tools.render(values)


@pytest.mark.parametrize("name", ["defaults", "groups", "options", "placement"])
def test_helm_finds_nothing_to_complain_about(tools: Tools, name: str) -> None:
    given = json.dumps(MATRIX[name])
    lint = tools.helm("lint", "--strict", str(CHART), "--values", "-", stdin=given)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingToolError, match="no-such-package is missing: make setup"):
        Tools.unpacked("no-such-package")


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_a_cluster_accepts_every_document(documents: list[Document]) -> None:
    check(documents)
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names))


def test_selectors_select_the_pods_that_they_are_for(documents: list[Document]) -> None:
    pods = rendered.all_templates(documents)
    for document in documents:
        spec = document.get("spec", {})
        match document["kind"]:
            case "Deployment" | "StatefulSet":
                selected = _matching(pods, spec["selector"])
                assert selected == [spec["template"]]
            case "Service":
                selected = _matching(pods, {"matchLabels": spec["selector"]})
                assert len(selected) == 1, document
                offered = {port["name"] for port in selected[0]["spec"]["containers"][0]["ports"]}
                assert {port["targetPort"] for port in spec["ports"]} <= offered
            case "PodDisruptionBudget" | "PodMonitor":
                assert len(_matching(pods, spec["selector"])) == 1, document
            case "NetworkPolicy":
                assert _matching(pods, spec["podSelector"]), document


def test_what_pods_refer_to_is_there_or_is_the_operators(
    documents: list[Document], values: Values
) -> None:
    made = {(d["kind"], d["metadata"]["name"]) for d in documents}
    theirs = set(_strings(values))
    for template in rendered.all_templates(documents):
        for kind, name, optional in _references(template["spec"]):
            assert (kind, name) in made or name in theirs or optional, (kind, name)


def test_every_pod_is_closed_as_far_as_it_can_be(documents: list[Document]) -> None:
    for template in rendered.all_templates(documents):
        pod = template["spec"]
        component = rendered.component_of(template)
        assert pod["enableServiceLinks"] is False  # PPD_* of a Service named ppd-*
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.get("automountServiceAccountToken", True) is (component == "router")
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            if component in ("router", "pool"):
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert security["readOnlyRootFilesystem"] is True


def test_the_router_may_list_and_watch_pods_and_nothing_else(documents: list[Document]) -> None:
    (role,) = of_kind(documents, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert not of_kind(documents, "ClusterRole")
    (binding,) = of_kind(documents, "RoleBinding")
    account = rendered.named(documents, "Deployment", "-router")["spec"]["template"]["spec"]
    (subject,) = binding["subjects"]
    assert subject["name"] == account["serviceAccountName"]
    assert subject["namespace"] == NAMESPACE
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]


@pytest.mark.parametrize("where", REFUSED)
def test_wrong_values_are_refused_by_the_schema(tools: Tools, where: str) -> None:
    done = tools.template(REFUSED[where])
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert f"at '{where.removesuffix('/')}" in done.stderr, done.stderr


def test_protected_workers_need_a_key(tools: Tools) -> None:
    done = tools.template({"secrets": {"protectWorkers": True}})
    assert "secrets.protectWorkers needs secrets.workerApiKey" in done.stderr


def test_there_is_a_mistake_for_every_template() -> None:
    templates = {p.name for p in (CHART / "templates").iterdir() if p.suffix in (".yaml", ".tpl")}
    assert templates == set(MISTAKES)


def test_everything_renders_every_template(tools: Tools, tmp_path: Path) -> None:
    done = tools.template(EVERYTHING)
    check(tools.render(EVERYTHING))
    rendered.router_config(tools.render(EVERYTHING), tmp_path)
    for name in MISTAKES:
        assert name.startswith("_") or f"/templates/{name}" in done.stdout, name


@pytest.mark.parametrize("template", MISTAKES)
def test_a_mistake_is_caught(tools: Tools, tmp_path: Path, template: str) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    right, wrong = MISTAKES[template]
    path = chart / "templates" / template
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    documents = tools.render(EVERYTHING, chart)
    with pytest.raises((InvalidDocumentError, ConfigError)):
        _read_all(documents, tmp_path)


def test_the_notes_name_the_commands(tools: Tools) -> None:
    flags = ("--dry-run=client", "--namespace", NAMESPACE)
    notes = tools.helm("install", "chat", str(CHART), *flags).stdout
    assert "service/chat-sglang-ppd-router 8000:80" in notes
    assert "There is no admin token" in notes


def _read_all(documents: list[Document], folder: Path) -> None:
    check(documents)
    rendered.router_config(documents, folder)
    rendered.pool_config(documents, folder)


def _matching(pods: list[Document], selector: Document) -> list[Document]:
    """The pods that a label selector selects."""
    found = []
    for pod in pods:
        labels = pod["metadata"]["labels"]
        exact = selector.get("matchLabels", {}).items() <= labels.items()
        among = all(labels[e["key"]] in e["values"] for e in selector.get("matchExpressions", ()))
        if exact and among:
            found.append(pod)
    return found


def _references(pod: Document) -> list[tuple[str, str, bool]]:
    """Objects that a pod needs: kind, name, and whether it starts without them."""
    found = (
        [("ServiceAccount", pod["serviceAccountName"], False)]
        if "serviceAccountName" in pod
        else []
    )
    for volume in pod["volumes"]:
        if "configMap" in volume:
            found.append(("ConfigMap", volume["configMap"]["name"], False))
        if "secret" in volume:
            found.append(("Secret", volume["secret"]["secretName"], False))
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            found.append(("PersistentVolumeClaim", claim, False))
    variables = [v for container in pod["containers"] for v in container.get("env", ())]
    keys = [v["valueFrom"]["secretKeyRef"] for v in variables if "valueFrom" in v]
    found += [("Secret", key["name"], key.get("optional", False)) for key in keys]
    return found


def _strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for inner in value.values() for text in _strings(inner)]
        case list():
            return [text for inner in value for text in _strings(inner)]
        case _:
            return []
