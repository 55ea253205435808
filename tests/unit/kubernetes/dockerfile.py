"""A Dockerfile as a list of instructions in stages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Stage:
    """One stage.

    Attributes:
        base: the image or the stage that it starts from, with its variables.
        instructions: names in capitals, with what follows them, in order.
    """

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        """Return what follows each instruction of a name."""
        return [rest for found, rest in self.instructions if found == name]


def read(path: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the arguments before the first stage, and the stages by name or number."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for name, rest in _instructions(path.read_text()):
        match name:
            case "FROM":
                base, _, alias = rest.partition(" AS ")
                current = Stage(base)
                stages[alias or str(len(stages))] = current
            case "ARG" if not stages:
                key, _, value = rest.partition("=")
                arguments[key] = value
            case _:
                current.instructions.append((name, rest))
    return arguments, stages


def inherited(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage, after those of the stages that it starts from."""
    stage = stages[name]
    before = inherited(stages, stage.base) if stage.base in stages else []
    return [*before, *stage.instructions]


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = (line.split(None, 1) for line in joined.splitlines())
    return [(name.upper(), rest) for name, rest in found]
