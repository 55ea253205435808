"""``ppd-eval report``: what was measured, as HTML, as Markdown, and in the project's documents."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppd.errors import ConfigError

from ..options import Commands
from .documents import Drift, Rewritten, rewritten
from .names import Catalogue
from .page import figure_files, html, markdown
from .parts import Section
from .results import Results
from .sections import sections
from .sources import NotMeasured

_LOG = "LOG.md"  # its numbers are those of the day on which they were written
_PAGE = "REPORT.md"


def add_to(commands: Commands) -> None:
    """Declare ``report``."""
    parser = commands.add_parser(
        "report",
        help="plots and tables of all that was measured",
        description=(
            "Make plots and tables of all raw files. What is not measured is named; a "
            "broken file is an error. The last line is one JSON object."
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of raw files")
    parser.add_argument("--html", type=Path, default=Path("report.html"))
    parser.add_argument(
        "--markdown",
        type=Path,
        help="and its figures, in a folder beside it, named like it in small letters",
    )
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="whose marked tables and numbers are written; README.md and docs/ beside the results",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a document is not what its rows give",
    )


def run(options: argparse.Namespace) -> int:
    """Write the report and the documents, or check them.

    The last line on stdout is one JSON object.

    Returns:
        The exit status: 1 if a document is checked and differs from its rows.

    Raises:
        ConfigError: a raw file, a document or a marker is missing or broken, or a file cannot be
            written.
    """
    if not options.results.is_dir():
        raise ConfigError(f"{options.results}: no such folder of raw files")
    results = Results(options.results)
    documents = options.documents or list(_documents(options.results))
    found = sections(results)
    catalogue = Catalogue(results)
    made = {
        path: rewritten(_read(path), path.as_posix(), catalogue.block, catalogue.number)
        for path in documents
    }
    if options.check:
        return _check(options.markdown or _page(options.results), found, made)
    try:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(html(found))
        if options.markdown is not None:
            _write_page(options.markdown, found)
        for path, document in made.items():
            if document.drifts:
                path.write_text(document.text)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    missing = [section.source.file for section in found if isinstance(section.source, NotMeasured)]
    summary = {"part": "report", "html": str(options.html), "sections": len(found)}
    changed = sorted(str(path) for path, document in made.items() if document.drifts)
    print(json.dumps(summary | {"not_measured": sorted(set(missing)), "changed": changed}))
    return 0


def _documents(results: Path) -> Iterator[Path]:
    root = results.parent
    if (root / "README.md").is_file():
        yield root / "README.md"
    yield from sorted(
        path for path in (root / "docs").glob("*.md") if path.name not in (_LOG, _PAGE)
    )


def _page(results: Path) -> Path | None:
    page = results.parent / "docs" / _PAGE
    return page if page.is_file() else None


def _write_page(path: Path, found: Sequence[Section]) -> None:
    folder = path.with_name(path.stem.lower())
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(found, folder.name))
    for name, figure in figure_files(found):
        (folder / name).write_text(figure)


def _check(page: Path | None, found: Sequence[Section], made: dict[Path, Rewritten]) -> int:
    """Print a diff of each table and number that is not what its rows give."""
    drifts = [drift for document in made.values() for drift in document.drifts]
    if page is not None:
        text = markdown(found, page.stem.lower())
        before = _read(page)
        if text != before:
            drifts.append(Drift(page.as_posix(), "page", before.split("\n"), text.split("\n")))
    for drift in drifts:
        print(f"{drift.document}: {drift.name} is not what its rows give\n{drift.diff()}\n")
    if drifts:
        print("`make report` writes what the rows give", file=sys.stderr)
    markers = sum(len(document.names) for document in made.values())
    drifted = [f"{drift.document} {drift.name}" for drift in drifts]
    print(json.dumps({"part": "report", "markers": markers, "drifted": drifted}))
    return int(bool(drifts))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
