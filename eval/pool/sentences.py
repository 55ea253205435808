"""Real sentences to search among, from files and from Python's docstrings.

Files are text (one or more sentences a line) or JSONL with ``messages[].content``. What they lack
is taken from the docstrings of Python's library and of its installed packages: English text that is
there on every machine, though not the same on each.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ppd.errors import ConfigError

_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*•]\s+")
_MIN_WORDS, _MAX_WORDS = 5, 20


def collect(files: Sequence[Path], count: int, seed: int) -> tuple[list[str], int]:
    """Return ``count`` different sentences in random order, and how many are from docstrings.

    Raises:
        ConfigError: a file cannot be read, or there are not so many.
    """
    kept: dict[str, None] = {}
    for path in files:
        kept.update(dict.fromkeys(_sentences(_texts(path))))
    given = list(kept)
    source = random.Random(seed)
    source.shuffle(given)
    given = given[:count]
    more: dict[str, None] = {}
    for text in _docstrings(source):
        if len(given) + len(more) >= count:
            break
        more.update(
            dict.fromkeys(sentence for sentence in _sentences([text]) if sentence not in kept)
        )
    documented = list(more)[: count - len(given)]
    if len(given) + len(documented) < count:
        raise ConfigError(f"{len(given) + len(documented)} sentences found, {count} needed")
    mixed = given + documented
    source.shuffle(mixed)
    return mixed, len(documented)


def _texts(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if path.suffix != ".jsonl":
        yield from lines
        return
    for line in lines:
        for message in json.loads(line).get("messages", ()):
            if isinstance(content := message.get("content"), str):
                yield content


def _docstrings(source: random.Random) -> Iterator[str]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    source.shuffle(paths)
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # test data that is no Python on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield text


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for part in _END.split(text):
            sentence = " ".join(part.split())
            words = sentence.count(" ") + 1
            if _MIN_WORDS <= words <= _MAX_WORDS and sum(
                c.isalpha() or c == " " for c in sentence
            ) > 0.8 * len(sentence):
                yield sentence
