"""``ppd-eval serve``: the demo's cluster, left up to chat with."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType

from ppd.contract import Role

from . import real_model
from .cluster import ClusterError, launching, require_free, share_flags, wait_all
from .options import Commands, cluster_options

_HOW_TO = """
Ready. Chat with it:

  curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{{"model": "default", "max_tokens": 32, "messages": [{{"role": "user", "content":
      "Please list the four seasons of the year, and one thing for each."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="any")
  client.chat.completions.create(model="default", max_tokens=32,
                                 messages=[{{"role": "user", "content": "Hello"}}])

A later turn of a chat of some 50 tokens or more can be local; shorter ones stay remote.
What happened to each turn: curl {url}/metrics, and the log {log}
Stop it: Ctrl-C here, or kill {pid}
"""


def add_to(commands: Commands) -> None:
    """Declare ``serve``."""
    parser = commands.add_parser(
        "serve",
        parents=[cluster_options("SmolLM2-135M-Instruct")],
        help="leave a cluster up",
        description=(
            "Start a prefill worker, a decode worker and a router, and print how to chat "
            "with them and how to stop them."
        ),
    )
    parser.add_argument("--policy", default="ppd", help="policy of the router")
    parser.add_argument("--port", type=int, default=0, help="port of the router; 0: any free one")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ClusterError: a process did not start, or died while serving.
    """
    served = real_model.choose(options.model)
    if options.port:
        require_free(options.port)
    print(f"model: {served.description}")
    print("starting a prefill worker, a decode worker and a router ...", flush=True)
    signal.signal(signal.SIGTERM, _interrupt)
    with launching(options.logs) as launch:
        try:
            flags = served.worker_flags
            prefill = launch.worker(Role.PREFILL, served.path, *flags, *share_flags(0, 2))
            decode = launch.worker(Role.DECODE, served.path, *flags, *share_flags(1, 2))
            wait_all([prefill, decode])
            router = launch.router(
                [prefill], [decode], "--policy", options.policy, port=options.port or None
            )
            wait_all([router])
            print(_HOW_TO.format(url=router.url, log=router.log, pid=os.getpid()), flush=True)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until one of them ends
            ended = next(p for p in launch.started if p.popen.poll() is not None)
            raise ClusterError(f"{ended.name} {ended.ending()}")
        except KeyboardInterrupt:
            print("stopping ...", flush=True)
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
