"""``ppd-router``: the command line."""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from ppd import __version__
from ppd.errors import PpdError
from ppd.policies import NAMES

from .config import TABLE_POLICY, RouterConfig, read_config
from .server import serve


def parse_config(argv: Sequence[str] | None) -> tuple[RouterConfig, str]:
    """The configuration and the log level of a command line.

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
    add("--config", metavar="FILE", help="TOML, see docs/REFERENCE.md")
    add("--prefill", nargs="+", metavar="URL", help="prefill workers")
    add("--decode", nargs="+", metavar="URL", help="decode workers")
    add("--replica", nargs="+", metavar="URL", help="workers that do both (--policy replica)")
    add(
        "--accept-workers",
        action="store_true",
        help="let workers announce themselves (ppd-worker --ppd-routers); only those that know "
        "$PPD_WORKER_TOKEN, if it is set",
    )
    policies = ", ".join((TABLE_POLICY, *NAMES))
    add("--policy", help=f"route of later turns: {policies} (default: {default.policy})")
    add("--table", metavar="FILE", help="decision table (default: the shipped one of the model)")
    add("--decision-log", metavar="FILE", help="append each decision and its outcome")
    add("--host", help=f"address to listen on (default: {default.host})")
    add("--port", type=int, help=f"0: any free one (default: {default.port})")
    add("--startup-timeout-s", type=float, help=f"default: {default.startup_timeout_s:g}")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="default: info")
    add("--version", action="version", version=__version__)
    options = vars(parser.parse_args(argv))
    log_level = str(options.pop("log_level", "info"))
    path = options.pop("config", None)
    base = default if path is None else read_config(path)
    config = msgspec.structs.replace(base, **options)
    urls = {
        role: tuple(url.rstrip("/") for url in getattr(config, role))
        for role in ("prefill", "decode", "replica")
    }
    return msgspec.structs.replace(config, **urls), log_level


def main(argv: Sequence[str] | None = None) -> None:
    try:
        config, log_level = parse_config(argv)
        logging.basicConfig(
            level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        config.check()
        _raise_file_limit()
        _spare_time()
        uvloop.run(serve(config))
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _raise_file_limit() -> None:
    """Three connections a remote turn: the usual soft limit of 1024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _spare_time() -> None:
    """Garbage is looked for every few thousand requests, not every few; and no log record is
    asked which thread and process it is from."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


if __name__ == "__main__":
    main()
