"""Commands, flags, variables and metrics: what a document names must exist in the code.

A flag of ``ppd-worker`` may be one of SGLang's. They are read from the installed SGLang's source,
which is not imported; without SGLang they are not checked.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from eval.cli import parser as make_eval_parser
from router.cli import make_parser as make_router_parser
from router.config.options import Secrets
from router.pool.cli import make_parser as make_pool_parser
from sglang_patches import settings
from sglang_patches.engines import SUPPORTED
from sglang_patches.flags import FLAGS
from sglang_patches.request_field import FLAG as CONDITIONAL_FLAG
from sglang_patches.worker import make_parser as make_worker_parser

from . import metrics
from .commands import subcommands
from .markdown import code_blocks, code_spans, is_table_row, paragraphs, without_code

_COMMANDS = {
    "ppd-router": make_router_parser,
    "ppd-worker": make_worker_parser,
    "ppd-pool": make_pool_parser,
    "ppd-eval": make_eval_parser,
}
_COMMAND = re.compile(rf"(?<![\w/.-])({'|'.join(_COMMANDS)})(?![\w.-])")
_ENDS = re.compile(r"\s[|&;>#]|[|;]\s|$")  # of a command in a shell's line
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?![\w*-])(?<!-)")
_WORD = re.compile(r"[a-z][a-z-]*")
_VARIABLE = re.compile(r"(?<![\w*])PPD_[A-Z_]+(?![A-Z_*])")
_METRIC = re.compile(r"(?<![\w/.])ppd_[a-z_]+(?![\w*.])")
_SAMPLES = ("", "_total", "_bucket", "_sum", "_count")
_PACKAGES = {"ppd_router", "ppd_eval", "ppd_tables"}

# Variables of the build, the load generator, retrieval and sharing, which no settings list.
_OTHER_VARIABLES = {
    *("PPD_API_KEY", "PPD_CHROMA_TOKEN", "PPD_COMPILE", "PPD_MILVUS_TOKEN"),
    *("PPD_SHARED_PASSWORD", "PPD_SHARED_RESPONSES_KEY"),
}

# Documents of the past, and those whose tables name flags of other programs in the first column.
_PAST = ("docs/LOG.md",)
_FOREIGN_COLUMN = ("docs/MIGRATION.md",)
_FOREIGN_FLAGS = frozenset({"--mini-lb", "--network", "--target", "--ulimit"})
_OF_A_COMMIT = re.compile(r"\bcommit [0-9a-f]{7}\b")  # a command that the present version lacks

_SGLANG_FIELD = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE)
_SGLANG_FLAG = re.compile(r"[\"'](--[a-z][\w-]*)[\"']")


def problems(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of every name that does not exist.

    Args:
        name: of the document, relative to the checkout.
        text: of it.
    """
    if name in _PAST:
        return
    past = [p for p in paragraphs(text) if _OF_A_COMMIT.search(p.text)]
    for line, code in _code(name, text):
        if not any(p.line <= line <= p.last_line for p in past):
            yield from ((line, problem) for problem in _wrong(code))


def _code(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and content of code spans and of the commands in blocks."""
    for block in code_blocks(text):
        yield from _joined(block.line, block.lines)
    if name in _FOREIGN_COLUMN:
        text = "\n".join(
            "||" + line.partition("|")[2].partition("|")[2] if is_table_row(line) else line
            for line in without_code(text).split("\n")
        )
    yield from ((line, " ".join(span.split())) for line, span in code_spans(text))


def _joined(first: int, lines: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield a block's lines; those that end with a backslash continue in the next one."""
    pending, at = "", first
    for number, line in enumerate(lines, first):
        at = at if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        yield at, pending + line
        pending = ""
    if pending:
        yield at, pending


def _wrong(code: str) -> Iterator[str]:
    found = list(_COMMAND.finditer(code))
    for command, following in pairwise([*found, None]):
        assert command is not None, "only the last one is"
        rest = code[command.end() : following.start() if following else len(code)]
        end = _ENDS.search(rest)
        yield from _wrong_command(command[1], rest[: end.start() if end else len(rest)])
    if not found and code.startswith("--"):
        for flag in _FLAG.findall(code):
            if not (flag in _own_flags() or flag in _FOREIGN_FLAGS or _is_sglangs(flag)):
                yield f"{flag}: there is no such flag"
    for variable in _VARIABLE.findall(code):
        if variable not in _variables():
            yield f"{variable}: there is no such variable"
    for metric in _METRIC.findall(code):
        if metric not in _metrics():
            yield f"{metric}: there is no such metric"


def _wrong_command(command: str, rest: str) -> Iterator[str]:
    parser, name = _COMMANDS[command](), command
    words = rest.split()
    while below := subcommands(parser):
        word = words.pop(0) if words else ""
        if word in below:
            parser, name = below[word], f"{name} {word}"
            continue
        if _WORD.fullmatch(word):
            yield f"{name} {word}: there is no such command"
        return
    known = _flags(parser) | {"--help"}
    for flag in _FLAG.findall(" ".join(words)):
        if flag not in known and not (command == "ppd-worker" and _is_sglangs(flag)):
            yield f"{name} {flag}: there is no such flag"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*(_flags(below) for below in subcommands(parser).values()))


@cache
def _own_flags() -> frozenset[str]:
    return frozenset().union(*(_flags(make()) for make in _COMMANDS.values()))


def _is_sglangs(flag: str) -> bool:
    return _sglang_flags() is None or flag in (_sglang_flags() or ())


@cache
def _sglang_flags() -> frozenset[str] | None:
    """The flags of the installed SGLang, by its source; None without it."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    server = Path(spec.origin).parent / "srt"
    files = [server / "server_args.py", *(server / "arg_groups" / "fields").glob("*.py")]
    texts = [file.read_text() for file in files if file.exists()]
    fields = {field for text in texts for field in _SGLANG_FIELD.findall(text)}
    flags = {flag for text in texts for flag in _SGLANG_FLAG.findall(text)} | {CONDITIONAL_FLAG}
    known = flags | {"--" + field.replace("_", "-") for field in fields}
    if version("sglang") != SUPPORTED[-1]:  # which lacks flags of the newest one
        known |= {f"--{flag.name}" for flag in FLAGS}
    return frozenset(known)


@cache
def _variables() -> frozenset[str]:
    secrets = {f"PPD_{name.upper()}" for name in Secrets.__struct_fields__}
    return frozenset({*settings.KNOWN, *secrets, *_OTHER_VARIABLES})


@cache
def _metrics() -> frozenset[str]:
    bases = {re.sub(r"_total$", "", name) for name in metrics.names()}
    return frozenset({base + suffix for base in bases for suffix in _SAMPLES} | _PACKAGES)
