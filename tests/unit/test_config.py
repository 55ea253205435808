"""The router's options and the plugin's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import router
from ppd.errors import ConfigError
from ppd.score import Targets, Weights
from ppd.table_policy import Correction
from router.cli import main, parse_config
from router.config.answer_cache import AnswerCacheConfig
from router.config.gateway import GatewayConfig
from router.config.kubernetes import Kubernetes
from router.config.limits import AdmissionLimits, RateLimit, Tenant
from router.config.options import RouterConfig
from router.config.retrieval import Milvus, RetrievalConfig, RetrievalOptions, TenantRetrieval
from router.server.check import check_everything
from router.server.supervisor import share_of
from sglang_patches.settings import Settings, read_settings

P, D = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_a_sound_command_line() -> None:
    config, check = parse_config(["--prefill", P + "/", "--decode", D, "--policy", "pd"])
    assert config.problems() == []
    assert (config.prefill, config.decode, config.policy, check) == ((P,), (D,), "pd", False)


def test_flags_of_workers_may_be_repeated() -> None:
    more = "http://127.0.0.1:3", "http://127.0.0.1:4"
    given = ["--prefill", P, "--decode", D, "--decode", *more, "--policy", "pd"]
    config, _ = parse_config(given)
    assert (config.prefill, config.decode) == ((P,), (D, *more))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefill": ()}, "--prefill URL is needed"),
        ({"decode": (P,)}, f"two workers on one URL: {P}"),
        ({"decode": ("localhost:30000",)}, "--decode must be http://HOST:PORT"),
        ({"decode": ("http://h:99999",)}, "--decode 'http://h:99999'"),
        ({"decode": ("http://h..svc:1",)}, "--decode 'http://h..svc:1'"),
        (
            {"gateway": GatewayConfig(port=0), "processes": 2, "admin_port": 1},
            "gateway.port must be given",
        ),
        ({"prefill": ("http://h:1/v1",)}, "no path"),
        ({"policy": "best"}, "no such policy: 'best'; there are ppd, replica, pd, full"),
        ({"port": 70000}, "port must be 0..65535"),
        ({"policy": "partial:2"}, "SHARE must be a number from 0 to 1, got '2'"),
        ({"policy": "threshold:uncached=many"}, "TOKENS must be a whole number, got 'many'"),
        ({"policy": "replica"}, "policy replica uses no --prefill workers"),
        (
            {"policy": "replica", "accept_workers": True, "prefill": (), "decode": ()},
            "at least one --replica URL is needed",
        ),
        ({"kubernetes": Kubernetes(namespace="")}, "kubernetes: namespace must be named"),
        (
            {"kubernetes": Kubernetes(namespace="n", decode="a=b"), "policy": "replica"},
            "kubernetes: policy uses no decode pods; kubernetes: a label selector is needed",
        ),
        (
            {"kubernetes": Kubernetes(namespace="n", decode="a=b", port=0)},
            "kubernetes: port must be 1..65535 or a port's name, got 0",
        ),
        (
            {"kubernetes": Kubernetes(namespace="n", decode="a=b"), "prefill": ()},
            "--prefill URL is needed",
        ),
        ({"weights": Weights(-1, 1)}, "weights must be numbers from 0 to"),
        ({"targets": Targets()}, "one of the targets ttft_ms and tpot_ms must be given"),
        ({"tenants": {"t": Tenant(Weights(0, 0))}}, "tenants.t: one of the weights must be"),
        ({"tenants": {"t": Tenant(keys=("secret",))}}, "not 64 hexadecimal digits"),
        (
            {"tenants": {n: Tenant(keys=("a" * 64,)) for n in "st"}},
            "tenants.t.keys: a key of s too",
        ),
        ({"rate": RateLimit(tokens_per_minute=-1)}, "rate.tokens_per_minute must be 0 or more"),
        (
            {"tenants": {"t": Tenant(rate=RateLimit(requests_per_minute=-1))}},
            "tenants.t.rate.requests_per_minute must be 0 or more",
        ),
        ({"admission": AdmissionLimits(max_wait_s=0)}, "admission.max_wait_s must be above 0"),
        ({"admission": AdmissionLimits(max_waiting=-1)}, "admission.max_waiting must be 0 or"),
        ({"worker_networks": ("10.0.0.1/8",)}, "worker_networks: 10.0.0.1/8 has host bits set"),
        ({"tls_key": "key.pem"}, "tls_certificate and tls_key belong together"),
        ({"admin_port": 8000}, "admin_port is the port: 8000"),
        ({"admin_port": -1}, "admin_port must be 0..65535"),
        ({"processes": 0}, "processes must be 1 or more"),
        ({"processes": 2}, "several processes need an admin_port"),
        ({"breaker_failures": -1}, "breaker_failures must be 0 or more"),
        ({"append_budget_tokens": 0}, "append_budget_tokens must be above 0"),
        ({"max_body_bytes": 0}, "max_body_bytes must be above 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        msgspec.structs.replace(RouterConfig(prefill=(P,), decode=(D,)), **changes).check()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        f"""
        prefill = ["{P}/"]
        decode = ["{D}"]
        policy = "full"
        corrections = ["load", "shrinkage"]
        weights = {{ ttft = 2, tpot = 0.5 }}
        [tenants.abc.targets]
        ttft_ms = 300
        """
    )
    config, _ = parse_config(["--config", str(file), "--policy", "ppd"])
    assert config.problems() == []
    assert (config.policy, config.prefill, config.weights) == ("ppd", (P,), Weights(2, 0.5))
    assert config.corrections == {Correction.LOAD, Correction.SHRINKAGE}
    assert config.tenants["abc"].objective == Targets(ttft_ms=300)


@pytest.mark.parametrize(
    "source",
    [
        {"kubernetes": Kubernetes(namespace="n", prefill="role=prefill", decode="role=decode")},
        {"workers_file": "workers.toml"},
        {"workers_file": "workers.toml", "policy": "replica"},
        {"accept_workers": True},
    ],
)
def test_discovery_replaces_the_list_of_workers(source: dict[str, Any]) -> None:
    assert RouterConfig(**source).problems() == []


def test_discovery_must_cover_every_role() -> None:
    only_decode = Kubernetes(namespace="n", decode="role=decode")
    (problem,) = RouterConfig(kubernetes=only_decode).problems()
    assert problem.startswith("at least one --prefill URL is needed with policy ppd")


def test_every_value_out_of_range_is_reported_by_its_own_name() -> None:
    nan = float("nan")
    config = RouterConfig(
        prefill=(P,),
        decode=(D,),
        port=-1,
        idle_timeout_s=nan,
        shutdown_delay_s=nan,
        rate=RateLimit(requests_per_minute=nan),
        tenants={"t": Tenant(rate=RateLimit(tokens_per_minute=-1))},
        admission=AdmissionLimits(max_in_flight=-2, max_wait_s=nan),
        kubernetes=Kubernetes(namespace="n", decode="a=b", port=""),
        retrieval=RetrievalConfig(url=P, link_bytes_per_s=0, min_ms=9.0, max_ms=1.0),
        answer_cache=AnswerCacheConfig(P, threshold=1.5, max_characters=0),
    )
    assert sorted(config.problems()) == [
        "admission.max_in_flight must be 0 or more, got -2",
        "admission.max_wait_s must be above 0, got nan",
        "answer_cache.max_characters must be above 0, got 0",
        "answer_cache.threshold must be above 0 and at most 1, got 1.5",
        "idle_timeout_s must be above 0, got nan",
        "kubernetes: port must be 1..65535 or a port's name, got ''",
        "port must be 0..65535, got -1",
        "rate.requests_per_minute must be 0 or more, got nan",
        "retrieval.link_bytes_per_s must be above 0, got 0",
        "retrieval.min_ms must be at most max_ms, got 9.0 and 1.0",
        "shutdown_delay_s must be 0 or more, got nan",
        "tenants.t.rate.tokens_per_minute must be 0 or more, got -1",
    ]


def test_a_default_searches_only_what_its_tenant_may_and_no_kept_answers() -> None:
    other = TenantRetrieval(collections=("b",), default=RetrievalOptions("a"))
    config = RouterConfig(
        prefill=(P,),
        decode=(D,),
        retrieval=RetrievalConfig(
            url=P, defaults={"m": RetrievalOptions("answers")}, tenants={"t": other}
        ),
        answer_cache=AnswerCacheConfig(P),
    )
    assert config.problems() == [
        "retrieval.tenants.t.default: collection 'a' is not one of the tenant's",
        "retrieval: a default searches the answer cache's 'answers'",
    ]


def test_ranges_have_bounds_that_are_allowed() -> None:
    config = RouterConfig(
        prefill=(P,),
        decode=(D,),
        port=65535,
        admin_port=0,
        breaker_failures=0,
        session_ttl_s=float("inf"),
        kubernetes=Kubernetes(namespace="n", decode="a=b", port="http"),
        answer_cache=AnswerCacheConfig(P, threshold=1.0),
    )
    assert config.problems() == []


def test_a_flag_replaces_a_value_of_the_file_that_is_out_of_range(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(f'prefill = ["{P}"]\ndecode = ["{D}"]\nport = 99999\n')
    config, _ = parse_config(["--config", str(file), "--port", "8001"])
    assert (config.port, config.problems()) == (8001, [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("polcy = 'pd'", "there is no option polcy"),
        (
            "port = 'a'\nhots = 1\nprefill = [1]",
            "port: Expected `int`, got `str`; prefill: Expected `str`, got `int` - at `$[0]`; "
            "there is no option hots",
        ),
        ("corrections = ['luck']", "Invalid enum value 'luck'"),
        ("policy = ", "router.toml: "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "router.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse_config(["--config", str(file)])


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("""
prot = 1
port = 99999
policy = "nope"
prefill = 3
[admission]
max_waitin = 3
max_in_flight = "a"
[kubernetes]
prefill = "role=prefill"
[tenants.a]
foo = 1
keys = ["zz"]
""")
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(file), "--decode", D])
    message = str(caught.value)
    for problem in (
        "there is no option prot;",
        "port must be 0..65535, got 99999",
        "no such policy: 'nope'",
        "prefill: Expected",
        "there is no option admission.max_waitin;",
        "admission.max_in_flight: Expected `int`, got `str`",
        "kubernetes.namespace is needed",
        "there is no option tenants.a.foo;",
        "tenants.a.keys[0]: not 64 hexadecimal digits",
    ):
        assert problem in message
    assert "at least one --prefill" not in message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SystemExit, match=r"^ppd-router: nowhere\.toml: .*No such file"):
        main(["--config", "nowhere.toml"])


def test_all_errors_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(prefill=("x",), decode=(), port=-1).check()
    assert str(caught.value) == (
        "--prefill must be http://HOST:PORT, got 'x'; at least one --decode URL is needed with "
        "policy ppd, or --accept-workers, workers_file or [kubernetes]; port must be 0..65535, "
        "got -1"
    )


def test_a_check_of_the_configuration_finds_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("grpc", "pymilvus"):
        monkeypatch.setitem(sys.modules, module, None)
    config = RouterConfig(
        prefill=(P,),
        decode=(D,),
        gateway=GatewayConfig(port=0),
        retrieval=RetrievalConfig(milvus=Milvus("http://m:19530", "http://e:1")),
    )
    with pytest.raises(ConfigError) as caught:
        check_everything(config)
    assert str(caught.value) == (
        "gateway needs more packages: pip install '.[gateway]' in a checkout of sglang-ppd; "
        "retrieval.milvus needs more packages: pip install '.[milvus]' in a checkout of sglang-ppd"
    )


def test_a_configuration_can_be_checked_without_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(f'prefill = ["{P}"]\ndecode = ["{D}"]\n')
    main(["--config", str(file), "--check-config"])
    assert capsys.readouterr().out == "the configuration is right\n"
    right = file.read_text()
    (tmp_path / "table.json").write_text("{}")
    file.write_text(
        f'{right}port = -1\ntable = "{tmp_path}/table.json"\ntls_certificate = "c"\ntls_key = "k"\n'
        'workers_file = "no.toml"\ndecision_log = "/nowhere/log"\naccept_workers = true\n'
        'worker_api_key = "secret"\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(file), "--check-config"])
    for problem in (
        "port must be 0..65535, got -1",
        "worker_api_key would be sent to every announced worker",
        "tls_certificate c, tls_key k: ",
        f"{tmp_path}/table.json: ",
        "workers_file: ",
        "decision_log: /nowhere/log cannot be written",
    ):
        assert problem in str(ended.value)
    assert "secret" not in str(ended.value)


def test_what_may_be_a_password_is_not_shown() -> None:
    for url in ("http://u:hidden@d:1", "http://u:hidden@d", "http://u:hidden@d:x"):
        with pytest.raises(ConfigError) as caught:
            RouterConfig(prefill=(P,), decode=(url,)).check()
        assert "--decode" in str(caught.value)
        assert "hidden" not in str(caught.value)


def test_the_command_ends_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^ppd-router: two workers on one URL"):
        main(["--prefill", P, "--decode", P])


def test_a_dead_worker_at_start_is_named(tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    config.write_text("startup_timeout_s = 0.1")
    with pytest.raises(SystemExit, match=f"^ppd-router: .* worker {P[:-1]}.* does not answer"):
        main(["--prefill", P, "--decode", D, "--config", str(config)])


@pytest.mark.parametrize("environment", [{}, {"PPD_ENABLE": "0", "PPD_TYPO": "1"}])
def test_the_plugin_is_off_unless_enabled(environment: dict[str, str]) -> None:
    assert read_settings(environment) is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"PPD_ENABLE": "yes"}, "PPD_ENABLE must be 0 or 1, got 'yes'"),
        (
            {"PPD_ENABLE": "1", "PPD_TYPO": "1"},
            "unknown option PPD_TYPO; known: PPD_ENABLE, PPD_MAX",
        ),
        (
            {"PPD_ENABLE": "1", "PPD_MAX_APPEND_TOKENS": "0"},
            "PPD_MAX_APPEND_TOKENS must be a whole number above 0, got '0'",
        ),
        (
            {"PPD_ENABLE": "1", "PPD_LINK_GBPS": "fast"},
            "PPD_LINK_GBPS must be a number from 0.1 to 1e6, got 'fast'",
        ),
    ],
)
def test_wrong_plugin_options_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings(environment)


def test_plugin_options() -> None:
    assert read_settings({"PPD_ENABLE": "1"}) == Settings()
    given = {"PPD_ENABLE": "1", "PPD_MAX_APPEND_TOKENS": "200"}
    assert read_settings(given) == Settings(max_append_tokens=200)
    assert read_settings({"PPD_ENABLE": "1", "PPD_UNROOMED": "1"}) == Settings(unroomed=True)
    assert read_settings({"PPD_ENABLE": "1", "PPD_LINK_GBPS": "25"}) == Settings(link_gbps=25.0)


def test_variables_of_kubernetes_and_of_the_router_are_no_plugin_options() -> None:
    """Kubernetes sets such variables in each pod for a Service named ``ppd-router``."""
    others = (
        "PPD_ROUTER_SERVICE_HOST",
        "PPD_ROUTER_SERVICE_PORT",
        "PPD_ROUTER_SERVICE_PORT_HTTP",
        "PPD_ROUTER_PORT",
        "PPD_ROUTER_PORT_8000_TCP",
        "PPD_ROUTER_PORT_8000_TCP_ADDR",
        "PPD_SERVICE_HOST",  # of a Service named ``ppd``
        "PPD_SERVICE_PORT",
        "PPD_PORT",
        "PPD_PORT_8000_TCP_ADDR",
        "PPD_WORKER_API_KEY",
        "PPD_ADMIN_TOKEN",
    )
    assert read_settings({"PPD_ENABLE": "1", **dict.fromkeys(others, "x")}) == Settings()
    for typo in ("PPD_ROUTER", "PPD_ROUTER_PORTS", "PPD_ADMIN_TOKENS"):
        with pytest.raises(ConfigError, match=f"unknown option {typo};"):
            read_settings({"PPD_ENABLE": "1", typo: "x"})


def test_every_variable_of_the_router_may_stand_beside_the_plugins() -> None:
    """One file of variables may serve the router and the workers."""
    sources = Path(router.__file__).parent.rglob("*.py")
    names = {name for path in sources for name in re.findall(r'"(PPD_[A-Z_]+)"', path.read_text())}
    assert {"PPD_SHARED_PASSWORD", "PPD_CHROMA_TOKEN"} <= names
    assert read_settings({"PPD_ENABLE": "1", **dict.fromkeys(names, "x")}) == Settings()


def test_processes_share_limits_by_the_number_there_is_not_the_one_that_is_written() -> None:
    now = RouterConfig(
        prefill=(P,),
        decode=(D,),
        processes=4,  # at start there were 2
        admin_port=9000,
        rate=RateLimit(600, 1000),
        tenants={"t": Tenant(rate=RateLimit(60, 0))},
        admission=AdmissionLimits(max_in_flight=5),
        decision_log="log",
    )
    share = share_of(now, 1, count=2, first_port=8100)
    assert (share.processes, share.admin_port, share.decision_log) == (2, 8101, "log.1")
    assert share.rate == RateLimit(300, 500)
    assert share.tenants["t"].rate == RateLimit(30, 0)
    assert share.admission.max_in_flight == 3
    with pytest.raises(ConfigError, match="need an admin_port"):
        share_of(msgspec.structs.replace(now, admin_port=None), 1, count=2, first_port=8100)
