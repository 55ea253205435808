"""Links, anchors and names of files: what a document points at must exist in the checkout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from .markdown import anchors, code_spans, links

_FOLDERS = (
    "ppd",
    "router",
    "sglang_patches",
    "eval",
    "tests",
    "tables",
    "results",
    "docs",
    ".github",
)
_FILE = re.compile(rf"(?:{'|'.join(map(re.escape, _FOLDERS))})/[\w./-]+\.\w+")


def link_problems(
    root: Path, document: Path, texts: Mapping[Path, str]
) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of every link that leads nowhere.

    Links to other hosts are not followed.

    Args:
        root: of the checkout.
        document: that has the links.
        texts: of all documents, by path.
    """
    for link in links(texts[document]):
        address, _, fragment = unquote(link.target).partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", address):
            continue
        target = (document.parent / address).resolve() if address else document
        if not target.is_relative_to(root):
            yield link.line, f"{link.target} leads out of the checkout"
        elif not target.exists():
            yield link.line, f"{link.target}: there is no such file"
        elif fragment and target in texts and fragment not in anchors(texts[target]):
            yield link.line, f"{link.target}: {target.name} has no heading with this anchor"


def file_problems(root: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of every file that is named but does not exist."""
    for line, span in code_spans(text):
        if _FILE.fullmatch(span) and not (root / span).exists():
            yield line, f"{span}: there is no such file"
