"""``ppd-pool``: the command line that builds and serves collections."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ppd import __version__
from ppd.errors import PpdError
from ppd.extras import install

from ..config.options import LogFormat
from ..observability.logs import log_to_stderr


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with a message of one line.

    Args:
        argv: the arguments; None: those of the process.
    """
    try:
        options = make_parser().parse_args(argv)
        if options.command == "build":
            _build(options)
        else:
            _serve(options)
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "faiss", "numpy", "h5py", "pyarrow", "tqdm"):
            raise
        sys.exit(f"ppd-pool: {error.name} is missing: {install('pool')}")
    except PpdError as error:
        sys.exit(f"ppd-pool: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from ppd.ann.neighbours import Finder  # main reports a missing extra

    from .config import Device, PoolConfig

    parser = argparse.ArgumentParser(
        prog="ppd-pool", description="Vector search for prefill and decode, shared by both."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build a collection from a file of vectors")
    build.add_argument("vectors", type=Path, help=".npy, .fbin, .parquet or .hdf5")
    build.add_argument("folder", type=Path, help="the collection; its last part is the name")
    build.add_argument("--metric", choices=("l2", "ip", "cosine"), default="cosine")
    build.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="int8")
    build.add_argument("--degree", type=int, default=48, help="neighbours of a row in the graph")
    build.add_argument("--knn", type=int, default=96, help="candidates that they are chosen from")
    build.add_argument(
        "--neighbours",
        type=Finder,
        choices=list(Finder),
        default=Finder.AUTO,
        help="library that finds them; auto: cuvs on a GPU where it is installed, else faiss",
    )
    build.add_argument("--column", default="vector", help="column of a parquet file")
    build.add_argument(
        "--indexed",
        action="append",
        default=[],
        metavar="FIELD",
        help="field of the metadata that filters use without a scan of all rows",
    )
    build.add_argument("--threads", type=int, help="threads that build (default: one a core)")
    serve = commands.add_parser(
        "serve", help="serve collections over HTTP", argument_default=argparse.SUPPRESS
    )
    default = PoolConfig()
    serve.add_argument("--config", metavar="FILE", help="TOML, see docs/POOL.md")
    serve.add_argument("--data", metavar="FOLDER", help="folder of the collections")
    serve.add_argument("--host", help=f"default: {default.host}")
    serve.add_argument("--port", type=int, help=f"0: any free one (default: {default.port})")
    serve.add_argument(
        "--device", type=Device, choices=list(Device), help="device that searches run on"
    )
    serve.add_argument("--threads", type=int, help="threads that search (default: one a core)")
    return parser


def _build(options: argparse.Namespace) -> None:
    from ppd.ann.snapshot import Precision, Shape
    from ppd.ann.space import Metric

    from .build import BuildOptions, build_collection
    from .progress import Bars

    shape = Shape(degree=options.degree, knn=options.knn)
    shape.check()
    wanted = BuildOptions(
        metric=Metric(options.metric),
        precision=Precision(options.precision),
        shape=shape,
        threads=options.threads or len(os.sched_getaffinity(0)),
        column=options.column,
        finder=options.neighbours,
        indexed=tuple(options.indexed),
    )
    bars = Bars()
    began_s = time.monotonic()
    with bars.visible():
        build_collection(options.vectors, options.folder, wanted, bars)
    took_s = time.monotonic() - began_s
    print(f"ppd-pool: {options.folder} in {took_s:.1f} s", file=sys.stderr)


def _serve(options: argparse.Namespace) -> None:
    from .config import PoolConfig, read_config
    from .serve import serve

    flags = vars(options)
    del flags["command"]
    path = flags.pop("config", None)
    config = PoolConfig(**flags) if path is None else read_config(path, flags)
    config.check()
    log_to_stderr("info", LogFormat.TEXT)
    uvloop.run(serve(config))


if __name__ == "__main__":
    main()
