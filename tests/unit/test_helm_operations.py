"""What operates a release: probes, autoscaling, monitors and network policies."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.documents.metrics import names as metric_names

from .kubernetes import documents as rendered
from .kubernetes.documents import component_of, named, of_kind
from .kubernetes.sources import pool_endpoints, router_endpoints, sglang_endpoints
from .kubernetes.tools import CHART, NAMESPACE, RELEASE, ROOT, Document, Tools
from .kubernetes.values import MATRIX


@pytest.fixture
def documents(tools: Tools, request: pytest.FixtureRequest) -> list[Document]:
    """What the chart renders with the values of a name."""
    return tools.render(MATRIX[request.param])


every = pytest.mark.parametrize("documents", MATRIX, indirect=True)


def by_component(documents: list[Document], kind: str) -> dict[str, Any]:
    """The specifications of a kind, by the last part of their names."""
    return {d["metadata"]["name"].rpartition("-")[2]: d["spec"] for d in of_kind(documents, kind)}


@every
def test_probes_ask_for_endpoints_that_exist(documents: list[Document]) -> None:
    served = {
        "router": router_endpoints(),
        "sglang": sglang_endpoints(),
        "pool": pool_endpoints(),
    }
    for template in rendered.all_templates(documents):
        for container in template["spec"]["containers"]:
            probes = [probe for name, probe in container.items() if name.endswith("Probe")]
            follower = component_of(template).endswith("-follower")
            # The router serves /live at once, and so needs no startup probe.
            fewer = {"router": 2}.get(container["name"], 3)
            assert len(probes) == (1 if follower else fewer)
            names = {port["name"] for port in container["ports"]}
            for probe in probes:
                assert probe["httpGet"]["path"] in served[container["name"]]
                assert probe["httpGet"]["port"] in names


@pytest.mark.parametrize("documents", ["hpa", "keda", "scaled groups"], indirect=True)
def test_pods_are_scaled_by_metrics_that_exist(documents: list[Document]) -> None:
    scaled = {d["metadata"]["name"] for d in documents if "replicas" not in d.get("spec", {})}
    for scaler in (
        *of_kind(documents, "HorizontalPodAutoscaler"),
        *of_kind(documents, "ScaledObject"),
    ):
        target = scaler["spec"]["scaleTargetRef"]
        named(documents, target["kind"], target["name"])
        assert target["name"] in scaled
        for metric in scaler["spec"].get("metrics", ()):
            if metric["type"] == "External":
                assert metric["external"]["metric"]["name"] in metric_names()
        for trigger in scaler["spec"].get("triggers", ()):
            query = trigger["metadata"]["query"]
            (name,) = re.findall(r"ppd_\w+", query)
            assert name in metric_names()
            assert f'namespace="{NAMESPACE}"' in query
            assert f'app_kubernetes_io_instance="{RELEASE}"' in query


def test_the_label_of_a_role_is_that_of_the_metrics() -> None:
    described = (ROOT / "docs/reference/metrics.md").read_text()
    for name in re.findall(r"ppd_worker_\w+", (CHART / "templates/_autoscaling.tpl").read_text()):
        (row,) = (line for line in described.splitlines() if line.startswith(f"| `{name}` "))
        assert "`role`" in row


def test_monitors_scrape_ports_with_metrics(tools: Tools) -> None:
    documents = tools.render(MATRIX["monitors"])
    monitors = by_component(documents, "PodMonitor")
    assert set(monitors) == {"router", "prefill", "decode", "replica", "pool"}
    for template in rendered.all_templates(documents):
        (endpoint,) = monitors[component_of(template)]["podMetricsEndpoints"]
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert endpoint["port"] in ports
        labels = set(monitors[component_of(template)]["podTargetLabels"])
        assert labels <= set(template["metadata"]["labels"])


def test_workers_are_open_to_routers_and_each_other_alone(tools: Tools) -> None:
    documents = tools.render(MATRIX["clients named"])
    policies = by_component(documents, "NetworkPolicy")
    from_router, from_workers = policies["workers"]["ingress"]
    assert [port["port"] for port in from_router["ports"]] == [30000, 5557]
    (router,) = from_router["from"]
    assert router["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert [port["port"] for port in from_workers["ports"]] == [8998, 20000, 1024]
    (workers,) = from_workers["from"]
    assert workers["podSelector"] == policies["workers"]["podSelector"]
    (clients,) = policies["router"]["ingress"]
    assert clients["from"] == MATRIX["clients named"]["networkPolicy"]["clients"]


def test_gateways_reach_the_picker_the_workers_and_their_sidecars(tools: Tools) -> None:
    values = MATRIX["gateway with sidecars"]
    gateways = values["networkPolicy"]["gateways"]
    documents = tools.render(values)
    policies = by_component(documents, "NetworkPolicy")
    ports = {
        component: [
            [p["port"] for p in r["ports"]] for r in policy["ingress"] if r.get("from") == gateways
        ]
        for component, policy in policies.items()
    }
    assert ports == {"router": [["gateway"]], "workers": [[30000, 8000]]}
    api = policies["router"]["ingress"][0]
    assert [port["port"] for port in api["ports"]] == ["api"]


def test_without_named_gateways_the_picker_is_as_open_as_the_api(tools: Tools) -> None:
    documents = tools.render(MATRIX["gateway"])
    policies = by_component(documents, "NetworkPolicy")
    assert [p["port"] for p in policies["router"]["ingress"][0]["ports"]] == ["api", "gateway"]
    assert all("from" in rule for rule in policies["workers"]["ingress"])


def test_a_sidecar_outlives_its_leader(tools: Tools) -> None:
    """Kubernetes stops restartable init containers last."""
    documents = tools.render(MATRIX["gateway with sidecars"])
    sidecars = {
        component_of(template): template["spec"].get("initContainers", [])
        for template in rendered.all_templates(documents)
    }
    (sidecar,) = sidecars.pop("decode")
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("routing", "Always")
    assert not any(sidecars.values())
