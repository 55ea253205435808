"""The router's options and the plugin's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.errors import ConfigError
from router.cli import main, parse_config
from router.config import RouterConfig
from sglang_patches.settings import is_enabled

P, D = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_a_sound_command_line() -> None:
    config, level = parse_config(["--prefill", P + "/", "--decode", D, "--policy", "pd"])
    config.check()
    assert (config.prefill, config.decode, config.policy, level) == ((P,), (D,), "pd", "info")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefill": ()}, "--prefill URL is needed"),
        ({"decode": (P,)}, f"two workers on one URL: {P}"),
        ({"decode": ("localhost:30000",)}, "--decode must be http://HOST:PORT"),
        ({"decode": ("http://h:99999",)}, "--decode 'http://h:99999'"),
        ({"prefill": ("http://h:1/v1",)}, "no path"),
        ({"policy": "best"}, "one of pd, full"),
        ({"port": 70000}, "--port must be 0..65535"),
        ({"max_body_bytes": 0}, "--max-body-bytes must be above 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        replace(RouterConfig(prefill=(P,), decode=(D,)), **changes).check()


def test_all_errors_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(prefill=("x",), decode=(), port=-1).check()
    assert str(caught.value).count(";") == 2


def test_the_command_ends_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^ppd-router: two workers on one URL"):
        main(["--prefill", P, "--decode", P])


def test_a_dead_worker_at_start_is_named() -> None:
    with pytest.raises(SystemExit, match=f"^ppd-router: .* worker {P[:-1]}.* does not answer"):
        main(["--prefill", P, "--decode", D, "--startup-timeout-s", "0.1"])


@pytest.mark.parametrize("environment", [{}, {"PPD_ENABLE": "0", "PPD_TYPO": "1"}])
def test_the_plugin_is_off_unless_enabled(environment: dict[str, str]) -> None:
    assert not is_enabled(environment)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"PPD_ENABLE": "yes"}, "PPD_ENABLE must be 0 or 1, got 'yes'"),
        ({"PPD_ENABLE": "1", "PPD_TYPO": "1"}, "unknown option PPD_TYPO; known: PPD_ENABLE"),
    ],
)
def test_wrong_plugin_options_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        is_enabled(environment)
