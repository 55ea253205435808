"""The pages that are made from the code; ``make reference`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import commands, endpoints, flags, metrics, options

FOLDER = Path("docs/reference")
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "endpoints.md": endpoints.page,
    "flags.md": flags.page,
    "metrics.md": metrics.page,
    "options.md": options.page,
}
_NOTE = "<!-- Made from the code by `make reference`. An edit here is lost. -->\n\n"


def problems(root: Path) -> Iterator[str]:
    """Yield every page that is not as the code has it."""
    for name, make in PAGES.items():
        path = root / FOLDER / name
        if not path.exists() or path.read_text() != _NOTE + make():
            yield f"{FOLDER / name}: it differs from the code; run make reference"


def write(root: Path) -> None:
    """Write all pages."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (root / FOLDER / name).write_text(_NOTE + make())
