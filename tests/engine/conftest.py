"""Fixtures of real SGLang workers. As many tests as possible share a worker: starts are slow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from eval.cluster import Launcher, free_port
from eval.tiny_layers import Family
from eval.tiny_model import ModelSpec, Vocabulary

from .workers import Workers, begin_stop, start_cluster, start_decode, worker_launcher

_TIMEOUT_S = 900.0  # of a test with its fixtures: only a hang takes that long
_MODELS = [
    pytest.param((Family.LLAMA, 1), id="llama-page1"),
    pytest.param((Family.QWEN3, 16), id="qwen3-page16"),
    pytest.param((Family.LLAMA, 16), id="llama-page16", marks=pytest.mark.matrix),
    pytest.param((Family.QWEN3, 1), id="qwen3-page1", marks=pytest.mark.matrix),
]
_SECOND = (Family.QWEN3, 16)
# The files that "make test" runs on the second model, too; "make test-matrix" runs the others.
_ON_BOTH = frozenset({"test_identity.py", "test_models.py", "test_table.py", "test_trouble.py"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as tests of the engine, and those of the matrix."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            if _model(item) == _SECOND and item.path.name not in _ON_BOTH:
                item.add_marker(pytest.mark.matrix)


def _model(item: pytest.Item) -> object:
    """The model of the shared workers that a test uses; None without them."""
    called = getattr(item, "callspec", None)
    return None if called is None else called.params.get("workers")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher of further workers, which it stops at the end of the session."""
    with worker_launcher(tmp_path_factory.mktemp("workers")) as launcher:
        yield launcher


@pytest.fixture(scope="session", params=_MODELS)
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """Prefill, decode and a monolithic server of a model whose text round-trips.

    The prefill worker publishes KV events, the decode worker does not.
    """
    family, page_size = request.param
    logs = tmp_path_factory.mktemp(f"{family}-page{page_size}")
    spec = ModelSpec(family=family)
    yield from start_cluster(
        spec, logs, page_size, monolithic=True, prefill_flags=kv_events_flags()
    )


@pytest.fixture(scope="session")
def bpe_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Prefill and decode of a model whose replies' text encodes to other ids than were generated.

    The decode worker collects metrics.
    """
    spec = ModelSpec(vocabulary=Vocabulary.BPE)
    logs = tmp_path_factory.mktemp("bpe")
    yield from start_cluster(spec, logs, 1, monolithic=False, decode_flags=("--enable-metrics",))


@pytest.fixture(scope="session")
def small_pool_workers(workers: Workers, launcher: Launcher) -> Iterator[Workers]:
    """The shared workers, but a decode worker with 2,000 tokens of KV that publishes KV events.

    It reserves hardly any KV for running decodes to grow in, except where it restores retracted
    requests.
    """
    pool = ("--max-total-tokens", "2000", "--schedule-conservativeness", "0.05")
    decode = start_decode(workers, launcher, "small-pool", *pool, *kv_events_flags())
    yield replace(workers, decode=decode)
    begin_stop([decode])


def kv_events_flags() -> tuple[str, str]:
    """Flags of a worker that publishes KV events on a port of its own."""
    endpoint = f"tcp://*:{free_port()}"
    return "--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": endpoint})


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client session of one test."""
    async with aiohttp.ClientSession() as session:
        yield session
