"""An interpreter that has imported SGLang, for reproductions with and without the plugin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.interpreter import Interpreter, interpreter_with

# A scheduler that fails kills its parent process, which is the interpreter here.
_PRELUDE = """
import signal
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
from sglang_patches.cpu import stand_ins
stand_ins.install()
import warnings
warnings.simplefilter("ignore")
import sglang.srt.managers.scheduler
import sglang.srt.managers.tokenizer_manager
import sglang.srt.disaggregation.mooncake.conn
"""
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "MC_FORCE_TCP": "true",
    "MOONCAKE_PROTOCOL": "tcp",
    "OMP_NUM_THREADS": "1",
    "PPD_ENABLE": "0",
}

Reproduction = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as tests of the engine."""
    for item in items:
        if "tests/upstream/" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)


@contextmanager
def reproducing(folder: Path, **environment: str) -> Iterator[tuple[Interpreter, Reproduction]]:
    """Give an interpreter that has imported SGLang, and the function that runs reproductions."""
    with interpreter_with(_PRELUDE, folder, **_ENVIRONMENT | environment) as interpreter:

        def run(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
            call = f"{name}.main({', '.join(map(repr, arguments))})"
            code = f"from tests.upstream.faults import {name}; {call}"
            result = interpreter.run(code, **environment)
            lines = result.stdout.splitlines()
            outcomes = [line for line in lines if line.startswith('{"outcome"')]
            assert len(outcomes) == 1, result.stdout + result.stderr
            outcome: dict[str, Any] = json.loads(outcomes[0])["outcome"]
            return outcome

        yield interpreter, run


@pytest.fixture(scope="session")
def stock(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Interpreter, Reproduction]]:
    """SGLang without the plugin's hooks, unless a reproduction has ``PPD_ENABLE=1``."""
    with reproducing(tmp_path_factory.mktemp("upstream")) as both:
        yield both


@pytest.fixture(scope="session")
def version(stock: tuple[Interpreter, Reproduction]) -> str:
    """The supported version that SGLang is, or that a source tree is read as."""
    code = "from sglang_patches.engines import installed; print(installed().read_as)"
    return stock[0].run(code).stdout.strip()


@pytest.fixture(scope="session")
def outcome_of(stock: tuple[Interpreter, Reproduction]) -> Reproduction:
    """Run a reproduction by its module's name and arguments, and return what it reports."""
    return stock[1]
