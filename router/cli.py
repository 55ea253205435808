"""``ppd-router``: the command line of the router."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import secrets
import signal
import ssl
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
from .server.build import build
from .server.check import check_everything
from .server.listening import local, peer_tls, trust_certificate
from .server.run import serve
from .server.supervisor import Supervisor, share_of

_LEVELS = ("debug", "info", "warning", "error")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; an option that is not given is absent."""
    default = RouterConfig()
    parser = argparse.ArgumentParser(
        prog="ppd-router",
        description="Route multi-turn OpenAI requests over SGLang prefill and decode workers: "
        "first turns remote (prefill worker, then KV transfer), later turns by the policy's "
        "decision. The configuration file has all options; flags take precedence over it.",
        argument_default=argparse.SUPPRESS,  # an absent flag must not replace the file's value
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML, see docs/ROUTER.md; read again on SIGHUP")
    add(
        "--check-config",
        action="store_true",
        help="report all problems of the configuration, and exit",
    )
    for name, what in (
        ("--prefill", "prefill workers"),
        ("--decode", "decode workers"),
        ("--replica", "workers that do both"),
    ):
        add(name, nargs="+", action="extend", metavar="URL", help=f"{what}; may be repeated")
    add(
        "--accept-workers",
        action="store_true",
        help="let workers announce themselves (ppd-worker --ppd-routers); from other hosts only "
        "with $PPD_WORKER_TOKEN",
    )
    policies = ", ".join((TABLE_POLICY, *NAMES))
    add("--policy", help=f"route of later turns: {policies} (default: {default.policy})")
    add("--table", metavar="FILE", help="decision table (default: a shipped one that fits)")
    add(
        "--no-shipped-tables",
        dest="shipped_tables",
        action="store_false",
        help="no decision table but --table",
    )
    add("--host", help=f"address to listen on (default: {default.host})")
    add("--port", type=int, help=f"0: any free one (default: {default.port})")
    add(
        "--processes",
        type=int,
        help=f"number of processes that share the port (default: {default.processes})",
    )
    add("--log-level", choices=_LEVELS, help=f"default: {default.log_level}")
    add("--version", action="version", version=f"{__version__} ({build()})")
    return parser


def parse_config(argv: Sequence[str] | None) -> tuple[RouterConfig, bool]:
    """Return the configuration of a command line, and whether it is only to be checked.

    Args:
        argv: the arguments; None: those of the process.

    Raises:
        ConfigError: the configuration file is wrong.
    """
    options = vars(make_parser().parse_args(argv))
    check = bool(options.pop("check_config", False))
    path = options.pop("config", None)
    config = (
        msgspec.structs.replace(RouterConfig(), **options)
        if path is None
        else read_config(path, options)
    )
    urls = {
        role: tuple(url.rstrip("/") for url in getattr(config, role))
        for role in ("prefill", "decode", "replica", "embedding")
    }
    return msgspec.structs.replace(config, **urls), check


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with a message of one line.

    Args:
        argv: the arguments; None: those of the process.
    """
    try:
        config, check = parse_config(argv)
        if check:
            check_everything(config)
            print("the configuration is right")
            return
        config.check()
        log_to_stderr(config.log_level, config.log_format)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # until the reloader handles it
        _raise_file_limit()
        _limit_gc()
        if config.processes == 1:
            # The first process of a container has no default action for it.
            signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
            uvloop.run(serve(config, lambda: parse_config(argv)[0]))
        else:
            secret, count, first = secrets.token_hex(16), config.processes, config.admin_port
            assert first is not None, "RouterConfig.check requires one"
            tls = peer_tls(config)
            run = partial(_run_process, argv, secret, count, first, tls)
            supervisor = Supervisor(config, partial(_read_again, argv, tls), run)
            sys.exit(supervisor.supervise())
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _read_again(argv: Sequence[str] | None, tls: ssl.SSLContext | None) -> RouterConfig:
    """Return the configuration as it is now; processes that start later trust its certificate."""
    config, _ = parse_config(argv)
    if tls is not None and config.tls_certificate:
        trust_certificate(tls, config)
    return config


def _run_process(
    argv: Sequence[str] | None,
    secret: str,
    count: int,
    first: int,
    tls: ssl.SSLContext | None,
    config: RouterConfig,
    index: int,
    port: int,
) -> None:
    """Run one of several processes.

    Args:
        argv: the command's arguments, for reloads.
        secret: that requests between the processes carry.
        count: of processes.
        first: the first admin port.
        tls: trusts the certificates that the other processes may have; None: they have none.
        config: of all processes together.
        index: number of the process.
        port: that all processes share.
    """

    def own_share(config: RouterConfig) -> RouterConfig:
        return msgspec.structs.replace(share_of(config, index, count, first), port=port)

    host = local(config.operators_host)
    scheme = "https" if config.tls_certificate else "http"
    others = {i: f"{scheme}://{host}:{first + i}" for i in range(count) if i != index}
    try:
        if tls is not None:
            trust_certificate(tls, config)  # the file may be newer than its last reload
        peers = Peers(index, others, secret, tls)

        def read() -> RouterConfig:
            return own_share(parse_config(argv)[0])

        uvloop.run(serve(own_share(config), read, peers))
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")
    finally:
        logging.shutdown()  # the supervisor's child ends without the interpreter's own exit


def _raise_file_limit() -> None:
    """Raise the limit of open files: a remote turn uses three connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _limit_gc() -> None:
    """Run the garbage collector every few thousand requests. Only failed requests leave cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 5, 20)


if __name__ == "__main__":
    main()
