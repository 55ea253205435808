"""The Helm chart and the code agree: workers are found; options, variables and flags exist."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from ppd.contract import Role
from ppd.errors import ConfigError
from router.cli import make_parser as make_router_parser
from router.config.options import Secrets
from router.config.shared import KEY_VARIABLE, PASSWORD_VARIABLE
from router.pool.cli import make_parser as make_pool_parser
from router.workers.kubernetes import Pods
from sglang_patches import settings
from sglang_patches.settings import read_settings
from sglang_patches.worker import make_parser as make_worker_parser
from tests.documents.chart import problems as schema_problems

from ..router.workers.fake_kubernetes import FakeKubernetes
from .kubernetes import documents as rendered
from .kubernetes.documents import arguments, component_of, containers, named, of_kind, variables
from .kubernetes.sources import sglang_flags
from .kubernetes.tools import CHART, ROOT, Document, Tools
from .kubernetes.values import MATRIX, Values

WITH_FILE = [name for name in MATRIX if name != "existing configuration"]
OWN_WORKERS = [name for name in WITH_FILE if name != "router alone"]
# Not PPD_*: of SGLang, Mooncake, Python, numba and the LeaderWorkerSet's controller.
OTHERS = {
    *("HF_TOKEN", "HOME", "MC_FORCE_TCP", "MOONCAKE_PROTOCOL", "NCCL_DEBUG", "NUMBA_CACHE_DIR"),
    "PYTHONUNBUFFERED",
}


@pytest.fixture
def documents(tools: Tools, request: pytest.FixtureRequest) -> list[Document]:
    """What the chart renders with the values of a name."""
    return tools.render(MATRIX[request.param])


every = pytest.mark.parametrize("documents", MATRIX, indirect=True)
with_file = pytest.mark.parametrize("documents", WITH_FILE, indirect=True)


def enabled(values: Values) -> set[Role]:
    """The roles whose workers the chart makes."""
    return {r for r in Role if values.get(r, {}).get("enabled", r is not Role.REPLICA)}


@with_file
def test_the_router_reads_its_file(documents: list[Document], tmp_path: Path) -> None:
    config = rendered.router_config(documents, tmp_path)
    (router,) = (p for p in rendered.all_templates(documents) if component_of(p) == "router")
    ports = {p["name"]: p["containerPort"] for p in router["spec"]["containers"][0]["ports"]}
    gateway = {} if config.gateway is None else {"gateway": config.gateway.port}
    assert ports == {"api": config.port, "operators": config.admin_port, **gateway}
    # What docs/ROUTER.md asks for.
    stages = 1 if config.gateway is None else 2
    least = config.shutdown_delay_s + stages * config.shutdown_grace_s + 5
    assert router["spec"]["terminationGracePeriodSeconds"] > least


def test_all_options_arrive_in_the_file(tools: Tools, tmp_path: Path) -> None:
    values = MATRIX["options"]
    config = rendered.router_config(tools.render(values), tmp_path)
    read = json.loads(msgspec.json.encode(config))
    assert not list(differences(values["router"]["config"], read))
    assert config.table == "/etc/ppd/table/table.json"


def test_tenants_get_the_digests_of_their_keys(tools: Tools, tmp_path: Path) -> None:
    documents = tools.render(MATRIX["secrets"])
    tenants = rendered.router_config(documents, tmp_path).tenants
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("sk-blue", "sk-red")}
    assert tenants["blue"].keys == ("0" * 64, digests["sk-blue"])
    assert tenants["red"].keys[0] == digests["sk-red"]
    assert len(tenants["red"].keys) == 2
    assert "sk-" not in json.dumps(documents)


def test_the_secret_has_the_keys_that_variables_name(tools: Tools) -> None:
    documents = tools.render(MATRIX["secrets"])
    secret = named(documents, "Secret", "sglang-ppd")
    assert secret["stringData"] == {
        "admin-token": "s3cret",
        "worker-api-key": "w0rker",
        "shared-password": "st0re",
        "shared-responses-key": "5a" * 32,
    }
    router = next(one for one in containers(documents) if "PPD_ADMIN_TOKEN" in variables(one))
    for name, key in (
        (PASSWORD_VARIABLE, "shared-password"),
        (KEY_VARIABLE, "shared-responses-key"),
    ):
        assert variables(router)[name]["secretKeyRef"]["key"] == key
    for container in containers(documents):
        flags = arguments(container)
        if "--role" in flags:
            assert flags["--api-key"] == "$(PPD_WORKER_API_KEY)"
        key = variables(container)["PPD_WORKER_API_KEY"]["secretKeyRef"]
        assert (key["name"], key["optional"]) == (secret["metadata"]["name"], False)
        assert key["key"] in secret["stringData"]


def test_the_pool_reads_its_file(tools: Tools, tmp_path: Path) -> None:
    documents = tools.render(MATRIX["pool"])
    config = rendered.pool_config(documents, tmp_path)
    assert (config.threads, config.step_shape.slots) == (4, 16)
    pool = named(documents, "StatefulSet", "-pool")["spec"]["template"]["spec"]
    data = {m["name"]: m["mountPath"] for m in pool["containers"][0]["volumeMounts"]}["data"]
    assert config.data.startswith(f"{data}/")
    assert pool["initContainers"][0]["command"][-1] == config.data
    assert pool["containers"][0]["ports"][0]["containerPort"] == config.port
    # The router uses it.
    retrieval = rendered.router_config(documents, tmp_path).retrieval
    assert retrieval is not None
    url = urlsplit(retrieval.url)
    service = named(documents, "Service", "-pool")
    assert (url.hostname, url.port) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )


@pytest.mark.parametrize("name", OWN_WORKERS)
def test_the_router_finds_the_workers_of_the_chart(tools: Tools, tmp_path: Path, name: str) -> None:
    documents = tools.render(MATRIX[name])
    found = rendered.found_by(rendered.router_config(documents, tmp_path), documents)
    # One pod template of each role is found: the leader's, in a group.
    assert {role: len(urls) for role, urls in found.items()} == dict.fromkeys(
        enabled(MATRIX[name]), 1
    )
    assert all(urlsplit(url).port == 30000 for urls in found.values() for url in urls)


async def test_the_router_watches_the_pods_of_the_chart(tools: Tools, tmp_path: Path) -> None:
    documents = tools.render(MATRIX["groups"])
    options = rendered.router_config(documents, tmp_path).kubernetes
    assert options is not None
    seen: asyncio.Queue[Mapping[str, Role]] = asyncio.Queue()
    async with FakeKubernetes().serving() as api, asyncio.TaskGroup() as tasks:
        for number, template in enumerate(rendered.all_templates(documents)):
            await api.put_pod(rendered.pod_of(template, f"10.0.0.{number}"))
        options = msgspec.structs.replace(options, kubeconfig=api.kubeconfig(tmp_path))
        pods = await Pods.open(options, (Role.PREFILL, Role.DECODE))
        watch = tasks.create_task(pods.watch(seen.put_nowait))
        while len(listed := await seen.get()) < 2:
            pass
        watch.cancel()
    assert sorted(listed.values()) == [Role.DECODE, Role.PREFILL]


def test_the_router_finds_workers_elsewhere(tools: Tools, tmp_path: Path) -> None:
    documents = tools.render(MATRIX["router alone"])
    options = rendered.router_config(documents, tmp_path).kubernetes
    assert options is not None
    assert (options.namespace, options.port) == ("engines", 30000)
    assert options.decode == "app=sglang,role=decode"
    (role,) = of_kind(documents, "Role")
    assert role["metadata"]["namespace"] == options.namespace


@every
def test_variables_are_the_programs_own(documents: list[Document]) -> None:
    routers = {f"PPD_{name.upper()}" for name in Secrets.__struct_fields__}
    routers |= {"PPD_CHROMA_TOKEN", "PPD_MILVUS_TOKEN", PASSWORD_VARIABLE, KEY_VARIABLE}
    for container in containers(documents):
        names = {variable["name"] for variable in container.get("env", ())}
        ours = {name for name in names if name.startswith("PPD_")}
        assert names - ours <= OTHERS
        if container["name"] == "router":
            assert ours <= routers
        elif container["name"] == "sglang":
            read_settings(dict.fromkeys(ours - {settings.TPOT_TARGET_MS}, "1"))
            assert settings.ENABLE in ours or arguments(container)["--role"] == Role.REPLICA
        else:
            assert not ours


def test_a_variable_that_the_plugin_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="PPD_APPEND_CHUNKS"):
        read_settings({"PPD_ENABLE": "1", "PPD_APPEND_CHUNKS": "1"})


def test_the_plugins_options_arrive(tools: Tools) -> None:
    documents = tools.render(MATRIX["plugin"])
    given = {arguments(c)["--role"]: c for c in containers(documents) if c["name"] == "sglang"}
    found = read_settings(variables(given["decode"]) | {"PPD_WORKER_TOKEN": ""})
    assert found is not None
    assert (found.tpot_target_ms, found.max_append_tokens, found.unroomed) == (40, 32768, True)
    assert read_settings(variables(given["prefill"])) is None
    assert arguments(given["decode"])["--mem-fraction-static"] == "0.85"


@every
def test_commands_and_flags_exist(documents: list[Document]) -> None:
    parsers = {"ppd-router": make_router_parser, "ppd-pool": make_pool_parser}
    for container in containers(documents):
        if container["name"] == "routing":  # a sidecar of others
            continue
        match container["command"][0]:
            case "ppd-worker":
                _, passed = make_worker_parser().parse_known_args(container["args"])
                assert {flag for flag in passed if flag.startswith("--")} <= sglang_flags()
            case "mkdir":
                pass
            case name:
                parsers[name]().parse_args(container["args"])


def test_ranks_of_a_group_find_their_leader(tools: Tools) -> None:
    for container in containers(tools.render(MATRIX["groups"])):
        flags = arguments(container)
        if "--role" not in flags:
            continue
        assert (flags["--tp-size"], flags["--nnodes"]) == ("16", "$(LWS_GROUP_SIZE)")
        assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)"
        host, _, port = flags["--dist-init-addr"].rpartition(":")
        assert host == "$(LWS_LEADER_ADDRESS)"
        assert int(port) in {item["containerPort"] for item in container["ports"]}


@every
def test_flags_and_ports_of_workers_agree(documents: list[Document]) -> None:
    for container in containers(documents):
        if container["name"] != "sglang":
            continue
        flags = arguments(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert flags["--port"] == str(ports["http"])
        if flags["--role"] == Role.PREFILL:
            assert flags["--disaggregation-bootstrap-port"] == str(ports["bootstrap"])
        if "--kv-events-config" in flags:
            endpoint = json.loads(flags["--kv-events-config"])["endpoint"]
            assert endpoint == f"tcp://*:{ports['kv-events']}"


def test_rdma_chooses_nics_and_tcp_is_the_alternative(tools: Tools) -> None:
    workers = [c for c in containers(tools.render(MATRIX["rdma"])) if c["name"] == "sglang"]
    assert {arguments(worker)["--role"] for worker in workers} == set(Role)
    for worker in workers:
        limits = worker["resources"]["limits"]
        assert "MC_FORCE_TCP" not in variables(worker)
        if arguments(worker)["--role"] == Role.REPLICA:  # it transfers nothing
            assert "rdma/hca" not in limits
            continue
        assert arguments(worker)["--disaggregation-ib-device"] == "mlx5_0,mlx5_1"
        assert limits["rdma/hca"] == "8"
        assert worker["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    for worker in containers(tools.render({})):
        if worker["name"] == "sglang":
            assert variables(worker)["MC_FORCE_TCP"] == "true"
            assert "--disaggregation-ib-device" not in arguments(worker)


def test_the_schema_has_the_options_of_the_code() -> None:
    assert list(schema_problems(ROOT)) == []


def test_a_name_that_the_schema_accepts_is_an_option(tools: Tools) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert re.fullmatch(
        schema["$defs"]["RouterOptions"]["properties"]["policy"]["pattern"], "partial:0.5"
    )
    done = tools.template({"router": {"config": {"policy": "threshold:uncached=512"}}})
    assert done.returncode == 0, done.stderr


def differences(given: object, read: object, where: str = "") -> list[str]:
    """Where what was read differs from what was given; further options of it do not count."""
    match given, read:
        case dict(), dict():
            return [
                found
                for key, value in given.items()
                for found in differences(value, read.get(key), f"{where}.{key}")
            ]
        case list(), list() if where.endswith(".corrections"):
            return [] if sorted(given) == sorted(read) else [where]
        case _:
            return [] if given == read else [f"{where}: {given!r} is {read!r}"]
