"""The plugin: off unless enabled, all hooks or none; and no process outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import aiohttp
import psutil
import pytest

from eval.cluster import Launcher, Process
from ppd.contract import Role
from ppd.policies import static_policy
from router.config.options import RouterConfig
from router.server.run import running

from .conversation import Conversation
from .interpreter import Interpreter, interpreter_with
from .workers import Workers, begin_stop, extra_environment, plugin_state, wait_ready

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
import pkgutil
for hook in HOOKS:
    pkgutil.resolve_name(hook.target)
"""


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """An interpreter that has imported SGLang, without the plugin's hooks."""
    folder = tmp_path_factory.mktemp("interpreter")
    with interpreter_with(PRELUDE, folder, SGLANG_USE_CPU_ENGINE="1") as interpreter:
        yield interpreter


def test_enabled_all_hooks_are_applied(sglang: Interpreter) -> None:
    result = sglang.run("load_plugins(); check_applied(HOOKS); print('applied')", PPD_ENABLE="1")
    assert result.stdout.endswith("applied\n"), result.stderr


def test_not_enabled_nothing_is_touched(sglang: Interpreter) -> None:
    result = sglang.run("""
        before = [pkgutil.resolve_name(h.target) for h in HOOKS]
        load_plugins()
        assert before == [pkgutil.resolve_name(h.target) for h in HOOKS]
        print("untouched")
    """)
    assert result.stdout.endswith("untouched\n"), result.stderr


def test_the_controller_of_ranks_waits_for_requests(sglang: Interpreter) -> None:
    """SGLang's own loop polls without a pause, and takes a core."""
    result = sglang.run("""
        load_plugins()
        import zmq
        from types import SimpleNamespace
        from sglang.srt.managers.data_parallel_controller import DataParallelController
        from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, sock_send

        class Socket(zmq.Socket):
            waits = []

            def poll(self, timeout=None, flags=zmq.POLLIN):
                self.waits.append(timeout)
                return super().poll(timeout, flags)

        fed, dispatched = [], []

        def feed():
            fed.append(None)
            if len(fed) == 3:
                sock_send(sender, FlushCacheReqInput())

        def dispatch(request):
            dispatched.append(type(request).__name__)
            if len(dispatched) == 2:
                print(len(fed), len(Socket.waits), all(Socket.waits), *dispatched)
                raise SystemExit

        context = zmq.Context()
        sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR, socket_class=Socket)
        receiver.bind("inproc://requests")
        sender.connect("inproc://requests")
        sock_send(sender, AbortReq(rid="a"))
        DataParallelController.event_loop(
            SimpleNamespace(
                soft_watchdog=SimpleNamespace(feed=feed),
                recv_from_tokenizer=receiver,
                _request_dispatcher=dispatch,
            )
        )
    """)
    assert result.stdout.endswith("3 3 True AbortReq FlushCacheReqInput\n"), result.stderr


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
def test_a_target_that_does_not_fit_ends_the_server_unpatched(
    sglang: Interpreter, change: str, named: str
) -> None:
    result = sglang.run(
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
    assert result.returncode == 1
    assert "served on" not in result.stdout
    assert result.stderr.splitlines()[-1].startswith("sglang-ppd: the hooks fit SGLang 0.5.21")
    assert named in result.stderr


def test_a_hook_that_was_not_applied_is_noticed(sglang: Interpreter) -> None:
    result = sglang.run(
        """
        from ppd.errors import ConfigError
        load_plugins()
        from sglang.srt.plugins.hook_registry import HookRegistry
        HookRegistry._patched.remove(HOOKS[-1].target)
        try:
            check_applied(HOOKS)
        except ConfigError as error:
            print(error, "expected:", HOOKS[-1].target)
        """,
        PPD_ENABLE="1",
    )
    found, expected = result.stdout.splitlines()[-1].split(" expected: ")
    assert found.endswith(f"did not apply the hooks on {expected}")


def test_an_engine_that_takes_local_prefills_itself_is_left_to_it(sglang: Interpreter) -> None:
    """As in SGLang's draft: the marker sets a field of the request."""
    result = sglang.run(
        """
        from types import SimpleNamespace
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers import io_struct
        io_struct.TokenizedGenerateReqInput.__annotations__["do_local_prefill"] = bool
        step = Scheduler.get_next_disagg_decode_batch_to_run
        seen = []
        Scheduler.handle_generate_request = lambda self, recv_req, anything=0: seen.append(
            (recv_req.do_local_prefill, anything)
        )
        load_plugins()
        assert Scheduler.get_next_disagg_decode_batch_to_run is step
        marked = {"do_local_prefill": True, "min_cached_tokens": 3}
        for custom, unroomed, room in ((marked, False, 5), (None, False, None), (None, True, None)):
            scheduler = SimpleNamespace(
                disaggregation_mode=DisaggregationMode.DECODE, ppd_unroomed=unroomed
            )
            request = SimpleNamespace(
                sampling_params=SimpleNamespace(custom_params=custom),
                bootstrap_room=room,
                do_local_prefill=False,
            )
            Scheduler.handle_generate_request(scheduler, request, anything=7)
        print(seen)
        """,
        PPD_ENABLE="1",
    )
    assert result.stdout.endswith("[(True, 7), (False, 7), (True, 7)]\n"), result.stderr


def test_another_version_of_sglang_is_named_and_refused(sglang: Interpreter) -> None:
    result = sglang.run(
        "import sglang.version; sglang.version.__version__ = '0.6.0'; load_plugins()",
        PPD_ENABLE="1",
    )
    message = "the hooks fit SGLang 0.5.21 and 0.5.23, not the installed 0.6.0"
    assert result.returncode == 1
    assert message in result.stderr


def test_the_stand_ins_do_not_shadow_real_packages(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sgl_kernel.py").write_text("REAL = True\n")
    code = "from sglang_patches.cpu import stand_ins; stand_ins.install(); import sgl_kernel"
    result = subprocess.run(
        [sys.executable, "-c", code + "; print(sgl_kernel.REAL, stand_ins.is_installed())"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "True False\n", result.stderr


@dataclass(frozen=True, slots=True)
class DecodeVariants:
    """Two decode workers of the BPE model.

    Attributes:
        unpatched: runs without ``PPD_ENABLE``.
        limited: accepts at most 200 append tokens at a time.
    """

    unpatched: Process
    limited: Process


@pytest.fixture(scope="module")
def variants(launcher: Launcher, bpe_workers: Workers) -> Iterator[DecodeVariants]:
    """Both decode workers, which the last tests of this module kill."""

    def start(name: str, variable: str, value: str) -> Process:
        with extra_environment(launcher, {variable: value}):
            return launcher.worker(Role.DECODE, bpe_workers.model, "--page-size", "1", name=name)

    unpatched = start("unpatched", "PPD_ENABLE", "0")
    limited = start("limited", "PPD_MAX_APPEND_TOKENS", "200")
    wait_ready(unpatched, limited)
    yield DecodeVariants(unpatched, limited)
    begin_stop([unpatched, limited])


async def test_an_unpatched_decode_server_serves_remote_turns(
    bpe_workers: Workers, variants: DecodeVariants, http: aiohttp.ClientSession
) -> None:
    unpatched = variants.unpatched
    async with http.get(f"{unpatched.url}/server_info") as response:
        assert "ppd" not in (await response.json())["internal_states"][0]
    marked = {
        "text": "x",
        "sampling_params": {"custom_params": {"do_local_prefill": True}},
    }
    async with http.post(f"{unpatched.url}/generate", json=marked) as response:
        assert response.status == 400
        assert "without bootstrap room" in await response.text()
    config = RouterConfig(prefill=(bpe_workers.prefill.url,), decode=(unpatched.url,), port=0)
    async with running(config, static_policy("full")) as url:
        conversation = Conversation(http, url)
        await conversation.send("An opening. " * 10)
        turn = await conversation.send("And a second turn.")
        assert (turn.route, turn.reason) == ("remote", "home_unpatched")


async def test_a_stampede_is_refused_before_any_work(
    bpe_workers: Workers, variants: DecodeVariants, http: aiohttp.ClientSession
) -> None:
    """Turns beyond the worker's limit go remote whatever routers expect; all are answered."""
    limited = variants.limited
    config = RouterConfig(
        prefill=(bpe_workers.prefill.url,), decode=(limited.url,), policy="full", port=0
    )

    async def converse(url: str, number: int) -> list[tuple[str, str]]:
        texts = (f"{number} opens. " * 20, "Short.", "a b c d e f g h " * 40)
        turns = await Conversation(http, url).send_all(texts)
        return [(turn.route, turn.reason) for turn in turns]

    async with running(config) as url:
        conversations = await asyncio.gather(*(converse(url, number) for number in range(8)))
    for routes in conversations:
        assert routes[0] == ("remote", "first_turn")
        assert routes[2] == ("remote", "refused_by_worker"), "longer than the bound by itself"
    assert ("local", "policy_full") in [routes[1] for routes in conversations]
    state = await plugin_state(http, limited)
    assert state["too_many_tokens"] >= 8
    assert (state["waiting"], state["append_tokens"]) == (0, 0)
    await replace(bpe_workers, decode=limited).settle(http)


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_worker_dies_whole(variants: DecodeVariants, victim: str) -> None:
    """The last tests here: each kills one of the two workers."""
    worker = variants.unpatched if victim == "server" else variants.limited
    server = psutil.Process(worker.popen.pid)
    family = server.children(recursive=True)
    schedulers = [p for p in family if "scheduler" in " ".join(p.cmdline()) + p.name()]
    assert schedulers
    (server if victim == "server" else schedulers[0]).send_signal(signal.SIGKILL)
    worker.popen.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
