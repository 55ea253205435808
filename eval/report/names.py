"""All names that markers in documents may have, and their text from a folder of raw files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ppd.errors import ConfigError

from .areas import (
    bursts,
    demo,
    emulated_paper,
    emulated_windows,
    emulation,
    engine,
    faults,
    figures,
    first_turns,
    gpu,
    gpu_tables,
    observable,
    payoff,
    placement,
    pool,
    rag,
    ranks,
    routers,
    shared,
    simulator,
    speculation,
    studies,
    tables,
    traffic,
)
from .parts import Block
from .results import Results

T = TypeVar("T")
Blocks = Mapping[str, Callable[[Results], Block]]
Numbers = Mapping[str, Callable[[Results], str]]


def _merged(*parts: Mapping[str, T]) -> dict[str, T]:
    merged: dict[str, T] = {}
    for part in parts:
        assert not merged.keys() & part.keys(), merged.keys() & part.keys()
        merged.update(part)
    return merged


BLOCKS: Blocks = _merged(
    bursts.BLOCKS,
    demo.BLOCKS,
    emulated_paper.BLOCKS,
    emulated_windows.BLOCKS,
    emulation.BLOCKS,
    engine.BLOCKS,
    faults.BLOCKS,
    figures.BLOCKS,
    first_turns.BLOCKS,
    gpu.BLOCKS,
    gpu_tables.BLOCKS,
    observable.BLOCKS,
    payoff.BLOCKS,
    placement.BLOCKS,
    pool.BLOCKS,
    rag.BLOCKS,
    ranks.BLOCKS,
    routers.BLOCKS,
    shared.BLOCKS,
    simulator.BLOCKS,
    speculation.BLOCKS,
    studies.BLOCKS,
    tables.BLOCKS,
    traffic.BLOCKS,
)
NUMBERS: Numbers = _merged(payoff.NUMBERS, routers.NUMBERS, tables.NUMBERS, traffic.NUMBERS)


class Catalogue:
    """What markers stand for, of one folder of raw files.

    Args:
        blocks, numbers: by name; those of the project's documents unless given.
    """

    def __init__(
        self, results: Results, blocks: Blocks = BLOCKS, numbers: Numbers = NUMBERS
    ) -> None:
        self._results = results
        self._blocks = blocks
        self._numbers = numbers

    def block(self, name: str) -> str:
        """Return the text of a block.

        Raises:
            ConfigError: there is no such block, or its rows are missing or lack a field.
        """
        return self._made(self._blocks, name, "block").markdown()

    def number(self, name: str) -> str:
        """Return a number.

        Raises:
            ConfigError: there is no such number, or its rows are missing or lack a field.
        """
        return self._made(self._numbers, name, "number")

    def _made(self, known: Mapping[str, Callable[[Results], T]], name: str, kind: str) -> T:
        if name not in known:
            raise ConfigError(f"no such {kind}; known: {', '.join(sorted(known))}")
        try:
            return known[name](self._results)
        except KeyError as error:
            raise ConfigError(f"its rows have no {error}") from error
