"""``ppd-eval report``: what was measured, as one HTML file and as Markdown, from raw files only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ppd.errors import ConfigError

from ..options import Commands
from .page import figure_files, html, markdown
from .sections import sections
from .sources import NotMeasured


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


def run(options: argparse.Namespace) -> int:
    """Write the report; the last line on stdout is one JSON object.

    Raises:
        ConfigError: a raw file is broken, or a file cannot be written.
    """
    if not options.results.is_dir():
        raise ConfigError(f"{options.results}: no such folder of raw files")
    found = sections(options.results)
    try:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(html(found))
        if options.markdown is not None:
            folder = options.markdown.with_name(options.markdown.stem.lower())
            folder.mkdir(parents=True, exist_ok=True)
            options.markdown.write_text(markdown(found, folder.name))
            for name, figure in figure_files(found):
                (folder / name).write_text(figure)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    missing = [section.source.file for section in found if isinstance(section.source, NotMeasured)]
    summary = {"part": "report", "html": str(options.html), "sections": len(found)}
    print(json.dumps(summary | {"not_measured": sorted(set(missing))}))
    return 0
