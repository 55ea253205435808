"""The pool's process, from start to stop."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp import web

from ppd.ann import process
from ppd.ann.lanes import Backend, cpu_backend
from ppd.ann.minilm import MiniLM, fetch
from ppd.errors import ConfigError

from ..embedder import Embedder
from .config import DEFAULT_SENTENCE_MODEL, Device, PoolConfig
from .embeddings import Embeddings, LocalEmbeddings, OnFirstText, ServedEmbeddings
from .metrics import PoolMetrics
from .searches import Searches
from .server import PoolServer, open_collections
from .shards import ShardsServer
from .warm import compile_for

_log = logging.getLogger("ppd_router.pool")


async def serve(config: PoolConfig, started: asyncio.Future[int] | None = None) -> None:
    """Run a pool until SIGTERM or SIGINT.

    Args:
        config: of the pool.
        started: its result is set to the port once the pool accepts connections.

    Raises:
        ConfigError: the address cannot be bound, or another pool serves the folder.
        IndexFileError: a collection cannot be opened.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if not config.shards:
            stack.enter_context(_locked(Path(config.data)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        runner = web.AppRunner(make_app(config, session), access_log=None)
        await runner.setup()
        process.settle()
        try:
            site = web.TCPSite(runner, config.host, config.port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(f"{config.host}:{config.port}: {error}") from error
            port = runner.addresses[0][1]
            _log.info("listening on http://%s:%d", config.host, port)
            if started is not None:
                started.set_result(port)
            await stop.wait()
        finally:
            await runner.cleanup()


def make_app(config: PoolConfig, session: aiohttp.ClientSession) -> web.Application:
    """Return the application of a pool, or of a front of shards."""
    metrics = PoolMetrics()
    if config.shards:
        return ShardsServer(config, session, metrics).app()
    backend = _backend(config.device)
    warm = partial(compile_for, backend=backend)
    collections = open_collections(Path(config.data), warm)
    if not collections:
        _log.info("%s: no collection is in it yet", config.data)
    for collection in collections.values():
        _log.info("%s: %d rows", collection.name, collection.count)
    embeddings = _embeddings(config, session)
    searches = Searches(config, backend, metrics, time.monotonic)
    return PoolServer(config, collections, searches, embeddings, metrics, warm).app()


def _embeddings(config: PoolConfig, session: aiohttp.ClientSession) -> Embeddings | None:
    if config.embeddings_url:
        embedder = Embedder(
            config.embeddings_url, config.embeddings_model, session, config.embeddings_timeout_s
        )
        return ServedEmbeddings(embedder)
    if config.sentence_model is None:
        return LocalEmbeddings(OnFirstText(lambda: MiniLM(fetch(_folder(DEFAULT_SENTENCE_MODEL)))))
    if config.sentence_model:
        return LocalEmbeddings(MiniLM(fetch(_folder(Path(config.sentence_model)))))
    return None


def _folder(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # the process has no home directory, as in some containers
        raise ConfigError(f"{path}: {error}: name sentence_model") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the context is open, so that only one pool writes to it.

    The kernel releases the lock of a killed process.

    Raises:
        ConfigError: another pool serves the folder, or it cannot be written to.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context((folder / ".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"data: another pool serves {folder}") from error
        except OSError as error:
            raise ConfigError(f"data: {folder}: {error}") from error
        yield


def _backend(device: Device) -> Backend:
    if device is Device.CPU:
        return cpu_backend()
    try:
        from ppd.ann.cuda.backend import cuda_backend
    except ModuleNotFoundError as error:
        raise ConfigError(f'device = "cuda" needs PyTorch with Triton: {error}') from error
    return cuda_backend()
