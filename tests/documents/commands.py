"""The page of commands, from their argument parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from eval.cli import parser as make_eval_parser
from router.cli import make_parser as make_router_parser
from router.pool.cli import make_parser as make_pool_parser
from sglang_patches.worker import make_parser as make_worker_parser

from .prose import sentences
from .tables import code, sentence, table

_INTRODUCTION = """\
# Commands

Every command prints its flags with `--help`.

"""


def page() -> str:
    """The page, in Markdown."""
    makers = (make_router_parser, make_worker_parser, make_pool_parser, make_eval_parser)
    return _INTRODUCTION + "\n".join(part for make in makers for part in _command(make()))


def flags_by_name(parser: argparse.ArgumentParser, command: str = "") -> dict[str, str]:
    """The flags of a parser, as code, by the name of the value that they set.

    Args:
        parser: of the whole command line.
        command: the name of a subcommand, whose flags are returned instead.
    """
    if command:
        parser = subcommands(parser)[command]
    return {
        action.dest: code(action.option_strings[-1])
        for action in parser._actions
        if action.option_strings
    }


def _command(parser: argparse.ArgumentParser, level: int = 2, summary: str = "") -> Iterator[str]:
    yield f"{'#' * level} `{parser.prog}`\n"
    if text := parser.description or summary:
        yield "\n".join(sentences(sentence(text))) + "\n"
    arguments = [action for action in parser._actions if _is_shown(action)]
    if arguments:
        yield table(("argument", "default", "meaning"), map(_row, arguments))
    summaries = _summaries(parser)
    for name, subparser in subcommands(parser).items():
        yield from _command(subparser, min(level + 1, 4), summaries.get(name, ""))


# argparse has no public way to the arguments of a parser.
def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's subcommands, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {
        choice.dest: choice.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }


def _is_shown(action: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction, argparse._VersionAction)
    return not isinstance(action, hidden)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    default = "required" if action.required else _default(action)
    meaning = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    if choices := _choices(action):
        meaning = f"{meaning}; {choices}" if meaning else choices
    return _name(action), default, sentence(meaning)


def _name(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    several = " ..." if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        return code(f"{value}{several}")
    takes_value = action.nargs != 0
    return ", ".join(
        code(f"{flag} {value}{several}" if takes_value else flag) for flag in action.option_strings
    )


def _choices(action: argparse.Action) -> str:
    return (
        ""
        if action.choices is None
        else "one of " + ", ".join(code(_text(c)) for c in action.choices)
    )


def _default(action: argparse.Action) -> str:
    default = action.default
    if default is None or default is False or default == argparse.SUPPRESS or default in ([], ()):
        return ""
    several = isinstance(default, Sequence) and not isinstance(default, str)
    return code(" ".join(map(_text, default)) if several else _text(default))


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Path):
        return value.as_posix()
    return f"{value:g}" if isinstance(value, float) else str(value)
