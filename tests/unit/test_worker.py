"""The command that ``ppd-worker`` becomes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ppd.contract import Role
from sglang_patches.worker import Launch, main, plan_launch


def plan(role: Role, *passed: str, cpu: bool = True, **environment: str) -> Launch:
    return plan_launch(role, passed, cpu=cpu, environment=environment)


@pytest.mark.parametrize("cpu", [True, False])
def test_roles(cpu: bool) -> None:
    prefill, decode, replica = (plan(role, cpu=cpu) for role in Role)
    assert "--disaggregation-mode" not in replica.argv
    assert prefill.argv[prefill.argv.index("--disaggregation-mode") + 1] == "prefill"
    assert "--disaggregation-decode-enable-radix-cache" in decode.argv
    assert decode.environment["PPD_ENABLE"] == prefill.environment["PPD_ENABLE"] == "1"
    assert "PPD_ENABLE" not in replica.environment
    for launch in (prefill, decode, replica):
        assert "--enable-cache-report" in launch.argv
        assert ("sglang_patches.cpu.launch" in launch.argv) is cpu
        assert ("--device" in launch.argv) is cpu


def test_a_plain_worker_runs_without_the_plugin_whatever_is_exported() -> None:
    launch = plan_launch(Role.DECODE, [], cpu=True, environment={"PPD_ENABLE": "1"}, plain=True)
    assert launch.environment["PPD_ENABLE"] == "0"


def test_only_the_older_sglang_must_not_send_early() -> None:
    name = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
    for engine, value in (("0.5.21", "0"), ("0.5.23", None)):
        launch = plan_launch(Role.PREFILL, [], cpu=False, environment={}, engine=engine)
        assert launch.environment.get(name) == value


def test_the_callers_flags_and_variables_win() -> None:
    launch = plan(Role.DECODE, "--page-size", "16", "--chunked-prefill-size=64", PPD_ENABLE="0")
    assert "--chunked-prefill-size" not in launch.argv
    assert "--chunked-prefill-size=64" in launch.argv
    assert "PPD_ENABLE" not in launch.environment


def test_the_flags_of_a_config_file_win_but_for_the_role(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("chunked-prefill-size: 64\ndisaggregation-mode: prefill\npage_size: 16\n")
    launch = plan(Role.DECODE, "--config", str(file))
    assert "--chunked-prefill-size" not in launch.argv
    assert launch.argv[launch.argv.index("--disaggregation-mode") + 1] == "decode"
    for content in ("- a list", "{", ""):
        file.write_text(content)
        assert "--chunked-prefill-size" in plan(Role.DECODE, "--config", str(file)).argv
    assert "--chunked-prefill-size" in plan(Role.DECODE, "--config", "/nowhere").argv
    assert "--chunked-prefill-size" in plan(Role.DECODE, "--config").argv


@pytest.mark.parametrize(
    ("passed", "content", "threads"),
    [
        ((), "device: cpu", True),
        ((), "device: cuda", False),
        (("--device=cuda",), "device: cpu", False),
        (("--device", "cpu"), "device: cuda", True),
    ],
)
def test_the_device_may_be_in_the_config_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    passed: tuple[str, ...],
    content: str,
    threads: bool,
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(content)
    main(["--role", "decode", "--model-path", "/m", "--config", str(file), *passed, "--dry-run"])
    assert ("OpenMP thread(s)" in capsys.readouterr().err) is threads


def test_the_command_can_be_read_and_typed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--role", "decode", "--model", "/m o", "--device", "cpu", "--port", "7", "--dry-run"])
    printed = capsys.readouterr().err
    assert printed.startswith("ppd-worker: PPD_ENABLE=1 ")
    assert "--model-path '/m o' --device cpu --port 7" in printed


def test_threads_on_a_cpu_are_a_share_of_its_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--role", "decode", "--model", "m", "--device=cpu", "--dry-run"]
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(command)
    launch, taken = capsys.readouterr().err.splitlines()
    assert f"{cores} OpenMP thread(s) on {cores} core(s) (all of them" in taken
    assert "OMP_NUM_THREADS" not in launch
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    main(command)
    assert f"3 OpenMP thread(s) on {cores} core(s) ($OMP" in capsys.readouterr().err
    main([*command, "--cpu-threads", "1"])  # the flag wins
    launch, taken = capsys.readouterr().err.splitlines()
    assert f"1 OpenMP thread(s) on {cores} core(s) (--cpu-threads)" in taken
    assert " OMP_NUM_THREADS=1 " in launch


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device=cpu", "--cpu-threads", "0"], "must be 1 or more, got 0"),
        (["--device=cpu", "--cpu-threads", "x"], "invalid int value"),
    ],
)
def test_wrong_numbers_of_threads_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--role", "decode", "--model", "m", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--role", "decode"],
        ["--role", "x", "--model-path", "m"],
        ["--role", "decode", "--model-path", "m", "--device=cpu", "--disaggregation-mode=null"],
    ],
)
def test_wrong_flags_end_with_a_message(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_the_plugins_options_become_variables(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ppd-tpot-target-ms", "30", "--ppd-routers", "http://r:8000,http://s:8000"]
    main(["--role", "decode", "--model", "m", "--device=cpu", "--dry-run", *options])
    printed = capsys.readouterr().err
    assert "PPD_TPOT_TARGET_MS=30 PPD_ROUTERS=http://r:8000,http://s:8000 " in printed
    assert "--ppd" not in printed


def test_keys_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--api-key", "sk-one", "--admin-api-key=sk-two"]
    main(["--role", "decode", "--model", "m", "--device=cpu", "--dry-run", *keys])
    printed = capsys.readouterr().err
    assert "--api-key '***' '--admin-api-key=***'" in printed
    assert "sk-" not in printed


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["decode", "--ppd-tpot-target-ms", "fast"], "PPD_TPOT_TARGET_MS must be a number"),
        (["decode", "--ppd-append-chunk", "0"], "PPD_APPEND_CHUNK must be a whole number above 0"),
        (["decode", "--ppd-routers", "here"], "PPD_ROUTERS must be http://HOST:PORT, got 'here'"),
        (["replica", "--ppd-append-chunk", "64"], "a replica runs without the plugin"),
        (
            ["decode", "--ppd-append-chunk", "64", "--ppd-tpot-target-ms", "30"],
            "PPD_TPOT_TARGET_MS chooses the chunk, PPD_APPEND_CHUNK fixes it: give one",
        ),
    ],
)
def test_wrong_options_are_named_before_anything_starts(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "m", "--device=cpu", "--role", *argv])
    assert named in capsys.readouterr().err


def test_float32_weights_stay_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, kept in (("float32", True), ("bfloat16", False)):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype}))
        main(["--role", "replica", "--model", str(tmp_path), "--device=cpu", "--dry-run"])
        assert ("--dtype float32" in capsys.readouterr().err) is kept
