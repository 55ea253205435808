"""``ppd-router``: the command line."""

from __future__ import annotations

import argparse
import gc
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
import uvloop

from ppd import __version__
from ppd.errors import PpdError
from ppd.policies import NAMES

from .config.file import read_config
from .config.options import TABLE_POLICY, RouterConfig
from .observability.logs import log_to_stderr
from .peers import Peers
from .server.check import check_everything
from .server.listening import local, trusting
from .server.run import serve
from .server.supervisor import Supervisor, share_of

_LEVELS = ("debug", "info", "warning", "error")


def parse_config(argv: Sequence[str] | None) -> tuple[RouterConfig, bool]:
    """The configuration of a command line, and whether it shall only be checked.

    Raises:
        ConfigError: the configuration file is wrong.
    """
    default = RouterConfig()
    parser = argparse.ArgumentParser(
        prog="ppd-router",
        description="Route multi-turn OpenAI requests over SGLang prefill and decode workers: "
        "first turns remote (prefill worker, then KV transfer), later turns where the policy "
        "says. Options that have no flag stand in the configuration file; flags win over it.",
        argument_default=argparse.SUPPRESS,  # what is not given is the file's, or the default
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML, see docs/ROUTER.md; read again on SIGHUP")
    add("--check-config", action="store_true", help="say what is wrong with it, and end")
    add("--prefill", nargs="+", metavar="URL", help="prefill workers")
    add("--decode", nargs="+", metavar="URL", help="decode workers")
    add("--replica", nargs="+", metavar="URL", help="workers that do both")
    add(
        "--accept-workers",
        action="store_true",
        help="let workers announce themselves (ppd-worker --ppd-routers); from other hosts only "
        "with $PPD_WORKER_TOKEN",
    )
    policies = ", ".join((TABLE_POLICY, *NAMES))
    add("--policy", help=f"route of later turns: {policies} (default: {default.policy})")
    add("--table", metavar="FILE", help="decision table (default: the shipped one of the model)")
    add("--host", help=f"address to listen on (default: {default.host})")
    add("--port", type=int, help=f"0: any free one (default: {default.port})")
    add("--processes", type=int, help=f"that share the port (default: {default.processes})")
    add("--log-level", choices=_LEVELS, help=f"default: {default.log_level}")
    add("--version", action="version", version=__version__)
    options = vars(parser.parse_args(argv))
    check = bool(options.pop("check_config", False))
    path = options.pop("config", None)
    config = (
        msgspec.structs.replace(default, **options) if path is None else read_config(path, options)
    )
    urls = {
        role: tuple(url.rstrip("/") for url in getattr(config, role))
        for role in ("prefill", "decode", "replica", "embedding")
    }
    return msgspec.structs.replace(config, **urls), check


def main(argv: Sequence[str] | None = None) -> None:
    try:
        config, check = parse_config(argv)
        if check:
            check_everything(config)
            print("the configuration is right")
            return
        config.check()
        log_to_stderr(config.log_level, config.log_format)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can be heeded
        _raise_file_limit()
        _spare_time()
        if config.processes == 1:
            uvloop.run(serve(config, lambda: parse_config(argv)[0]))
        else:
            secret = secrets.token_hex(16)
            run = partial(_one_of, config, argv, secret)
            sys.exit(Supervisor(config, run).supervise())
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _one_of(
    config: RouterConfig, argv: Sequence[str] | None, secret: str, index: int, port: int
) -> None:
    """One of several processes."""
    first, count = config.admin_port, config.processes
    assert first is not None, "RouterConfig.check wants one"

    def mine(config: RouterConfig) -> RouterConfig:
        return msgspec.structs.replace(share_of(config, index, count, first), port=port)

    host = local(config.operators_host)
    scheme = "https" if config.tls_certificate else "http"
    others = {i: f"{scheme}://{host}:{first + i}" for i in range(count) if i != index}
    try:
        peers = Peers(index, others, secret, trusting(config))
        uvloop.run(serve(mine(config), lambda: mine(parse_config(argv)[0]), peers))
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")


def _raise_file_limit() -> None:
    """Three connections a remote turn: the usual soft limit of 1024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _spare_time() -> None:
    """Garbage is looked for every few thousand requests, not every few; what failed leaves some."""
    gc.freeze()
    gc.set_threshold(50_000, 5, 20)


if __name__ == "__main__":
    main()
