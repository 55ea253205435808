"""The plugin itself: off unless enabled, all hooks or none, and workers that die whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import aiohttp
import psutil
import pytest

from eval import tiny_model
from eval.cluster import Launcher, Process, wait_all
from ppd.contract import Role
from ppd.policies import static_policy
from router.config.options import RouterConfig
from router.server.run import running

from .conftest import BPE, Workers, plugin_state
from .talk import Talk

PRELUDE = """
from sglang_patches.cpu import stand_ins
stand_ins.install()
import warnings
warnings.simplefilter("ignore")
from sglang.srt.plugins import load_plugins
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang_patches.hooks import HOOKS
from sglang_patches.targets import check_applied
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_enabled_all_hooks_are_applied() -> None:
    ran = run_python("load_plugins(); check_applied(HOOKS); print('applied')", PPD_ENABLE="1")
    assert ran.stdout.endswith("applied\n"), ran.stderr


def test_not_enabled_nothing_is_touched() -> None:
    ran = run_python("""
        import pkgutil
        before = [pkgutil.resolve_name(h.target) for h in HOOKS]
        load_plugins()
        assert before == [pkgutil.resolve_name(h.target) for h in HOOKS]
        print("untouched")
    """)
    assert ran.stdout.endswith("untouched\n"), ran.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            "del DecodePreallocQueue.hold_rebootstrap",
            "DecodePreallocQueue.hold_rebootstrap is missing",
        ),
        (
            "Scheduler.abort_request = lambda self, request, force: None",
            "Scheduler.abort_request takes (self, request, force), expected (self, recv_req)",
        ),
    ],
)
def test_a_target_that_does_not_fit_ends_the_server_unpatched(change: str, named: str) -> None:
    ran = run_python(
        f"""
        {change}
        before = Scheduler.handle_generate_request
        try:
            load_plugins()
        finally:
            assert Scheduler.handle_generate_request is before
        print("served on")
        """,
        PPD_ENABLE="1",
    )
    assert ran.returncode == 1
    assert "served on" not in ran.stdout
    assert ran.stderr.splitlines()[-1].startswith("sglang-ppd: the hooks fit SGLang 0.5.21")
    assert named in ran.stderr


def test_a_hook_that_was_not_applied_is_noticed() -> None:
    ran = run_python(
        """
        from ppd.errors import ConfigError
        load_plugins()
        from sglang.srt.plugins.hook_registry import HookRegistry
        HookRegistry._patched.remove(HOOKS[-1].target)
        try:
            check_applied(HOOKS)
        except ConfigError as error:
            print(error)
        """,
        PPD_ENABLE="1",
    )
    assert "did not apply the hooks on sglang.srt.managers.tokenizer_manager.Sig" in ran.stdout


def test_an_engine_that_takes_local_prefills_itself_is_left_to_it() -> None:
    """As SGLang's draft has it: a field of the request, which the marker sets."""
    ran = run_python(
        """
        from types import SimpleNamespace
        from sglang.srt.managers import io_struct
        io_struct.TokenizedGenerateReqInput.__annotations__["do_local_prefill"] = bool
        step = Scheduler.get_next_disagg_decode_batch_to_run
        seen = []
        Scheduler.handle_generate_request = lambda self, recv_req, anything=0: seen.append(
            (recv_req.do_local_prefill, anything)
        )
        load_plugins()
        assert Scheduler.get_next_disagg_decode_batch_to_run is step
        for custom in ({"do_local_prefill": True, "min_cached_tokens": 3}, None):
            request = SimpleNamespace(
                sampling_params=SimpleNamespace(custom_params=custom), do_local_prefill=False
            )
            Scheduler.handle_generate_request(None, request, anything=7)
        print(seen)
        """,
        PPD_ENABLE="1",
    )
    assert ran.stdout.endswith("[(True, 7), (False, 7)]\n"), ran.stderr


def test_another_version_of_sglang_is_named_and_refused() -> None:
    ran = run_python(
        "import sglang.version; sglang.version.__version__ = '0.6.0'; load_plugins()",
        PPD_ENABLE="1",
    )
    told = "the hooks fit SGLang 0.5.21 and 0.5.23, not the installed 0.6.0"
    assert (ran.returncode, told in ran.stderr) == (1, True), ran.stderr


def test_the_stand_ins_do_not_shadow_real_packages(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sgl_kernel.py").write_text("REAL = True\n")
    code = "from sglang_patches.cpu import stand_ins; stand_ins.install(); import sgl_kernel"
    ran = subprocess.run(
        [sys.executable, "-c", code + "; print(sgl_kernel.REAL, stand_ins.is_installed())"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "True False\n", ran.stderr


@pytest.fixture
def unpatched(launcher: Launcher, bpe_workers: Workers) -> Iterator[Process]:
    """A decode server in the same environment, without ``PPD_ENABLE``."""
    launcher.environment["PPD_ENABLE"] = "0"
    worker = launcher.worker(Role.DECODE, tiny_model.ensure(BPE), "--page-size", "1")
    del launcher.environment["PPD_ENABLE"]
    wait_all([worker])
    yield worker
    worker.stop()


async def test_an_unpatched_decode_server_serves_remote_turns(
    bpe_workers: Workers, unpatched: Process, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{unpatched.url}/server_info") as answer:
        assert "ppd" not in (await answer.json())["internal_states"][0]
    marked = {
        "text": "x",
        "sampling_params": {"custom_params": {"do_local_prefill": True}},
    }
    async with http.post(f"{unpatched.url}/generate", json=marked) as answer:
        assert answer.status == 400
        assert "without bootstrap room" in await answer.text()
    config = RouterConfig(prefill=(bpe_workers.prefill.url,), decode=(unpatched.url,), port=0)
    async with running(config, static_policy("full")) as url:
        talk = Talk(http, url)
        await talk.say("An opening. " * 10)
        turn = await talk.say("And a second turn.")
        assert (turn.route, turn.reason) == ("remote", "home_unpatched")


@pytest.fixture
def strict(launcher: Launcher, bpe_workers: Workers) -> Iterator[Process]:
    """A decode server that takes no more than 200 append tokens at a time."""
    launcher.environment["PPD_MAX_APPEND_TOKENS"] = "200"
    worker = launcher.worker(Role.DECODE, tiny_model.ensure(BPE), "--page-size", "1")
    del launcher.environment["PPD_MAX_APPEND_TOKENS"]
    wait_all([worker])
    yield worker
    worker.stop()


async def test_a_stampede_is_refused_before_any_work(
    bpe_workers: Workers, strict: Process, http: aiohttp.ClientSession
) -> None:
    """Whatever routers believe: turns beyond the bound go remote, and all are answered."""
    config = RouterConfig(
        prefill=(bpe_workers.prefill.url,), decode=(strict.url,), policy="full", port=0
    )

    async def hold(url: str, number: int) -> list[tuple[str, str]]:
        talk = Talk(http, url)
        for text in (f"{number} opens. " * 20, "Short.", "a b c d e f g h " * 40):
            await talk.say(text)
        return [(turn.route, turn.reason) for turn in talk.turns]

    async with running(config) as url:
        held = await asyncio.gather(*(hold(url, number) for number in range(8)))
    for routes in held:
        assert routes[0] == ("remote", "first_turn")
        assert routes[2] == ("remote", "refused_by_worker"), "longer than the bound by itself"
    assert ("local", "policy_full") in [routes[1] for routes in held]
    state = await plugin_state(http, strict)
    assert state["too_many_tokens"] >= 8
    assert (state["waiting"], state["append_tokens"]) == (0, 0)
    await Workers(bpe_workers.prefill, strict, None, 1, bpe_workers.model).settle(http)


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_worker_dies_whole(launcher: Launcher, victim: str) -> None:
    worker = launcher.worker(Role.REPLICA, tiny_model.ensure(), name=f"dying-{victim}")
    wait_all([worker])
    server = psutil.Process(worker.popen.pid)
    family = server.children(recursive=True)
    schedulers = [p for p in family if "scheduler" in " ".join(p.cmdline()) + p.name()]
    assert schedulers
    (server if victim == "server" else schedulers[0]).send_signal(signal.SIGKILL)
    worker.popen.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
