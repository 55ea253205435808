"""``ppd-router``: the command line."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
from collections.abc import Sequence

import uvloop

from ppd import __version__
from ppd.decision import POLICIES
from ppd.errors import PpdError

from .config import RouterConfig
from .server import serve


def parse_config(argv: Sequence[str] | None) -> tuple[RouterConfig, str]:
    """The configuration and the log level of a command line."""
    default = RouterConfig(prefill=(), decode=())
    parser = argparse.ArgumentParser(
        prog="ppd-router",
        description="Route multi-turn OpenAI requests over SGLang prefill and decode workers: "
        "first turns remote (prefill worker, then KV transfer), later turns where the policy "
        "says.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--prefill", nargs="+", required=True, metavar="URL", help="prefill workers")
    add("--decode", nargs="+", required=True, metavar="URL", help="decode workers")
    add("--policy", default=default.policy, choices=POLICIES, help="route of later turns")
    add("--host", default=default.host, help="address to listen on")
    add("--port", type=int, default=default.port, help="port to listen on; 0: any free one")
    add("--max-body-bytes", type=int, default=default.max_body_bytes, help="largest request")
    add("--session-capacity", type=int, default=default.session_capacity, help="known turns")
    add("--session-ttl-s", type=float, default=default.session_ttl_s, help="forget after")
    add(
        "--startup-timeout-s",
        type=float,
        default=default.startup_timeout_s,
        help="wait for workers",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--version", action="version", version=__version__)
    options = vars(parser.parse_args(argv))
    log_level = str(options.pop("log_level"))
    for role in ("prefill", "decode"):
        options[role] = tuple(url.rstrip("/") for url in options[role])
    return RouterConfig(**options), log_level


def main(argv: Sequence[str] | None = None) -> None:
    config, log_level = parse_config(argv)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        config.check()
        _raise_file_limit()
        uvloop.run(serve(config))
    except PpdError as error:
        sys.exit(f"ppd-router: {error}")
    except OSError as error:
        sys.exit(f"ppd-router: cannot listen on {config.host}:{config.port}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _raise_file_limit() -> None:
    """Three connections a remote turn: the usual soft limit of 1024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
