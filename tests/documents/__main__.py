"""``python -m tests.documents check|write``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from . import chart, generated, names, prose, troubleshooting
from .links import file_problems, link_problems
from .settings import documents, read_settings


def main() -> None:
    """Check the documents of the checkout, or write its generated pages."""
    parser = argparse.ArgumentParser(prog="python -m tests.documents", description=__doc__)
    parser.add_argument("command", choices=("check", "write"))
    root = Path(__file__).parents[2]
    if parser.parse_args().command == "write":
        generated.write(root)
        chart.write(root)
        return
    found = list(problems(root))
    print(
        "\n".join([*found, f"documents: {len(found)} problems" if found else "documents: in order"])
    )
    sys.exit(bool(found))


def problems(root: Path) -> Iterator[str]:
    """Yield everything that is wrong with the documents of a checkout."""
    settings = read_settings(root)
    texts = {path: path.read_text() for path in documents(root)}
    for path, text in texts.items():
        name = path.relative_to(root).as_posix()
        found = [*link_problems(root, path, texts), *names.problems(name, text)]
        if name == troubleshooting.NAME:
            found += troubleshooting.problems(root, text)
        if name not in settings.unchecked_paths:
            found += file_problems(root, text)
        if name in settings.conforming:
            found += prose.problems(text, settings)
        yield from (f"{name}:{line}: {problem}" for line, problem in sorted(found))
    known = {path.relative_to(root).as_posix() for path in texts}
    for name in (*settings.conforming, *settings.unchecked_paths):
        if name not in known:
            yield f"pyproject.toml, tool.ppd-documents: there is no document {name}"
    yield from generated.problems(root)
    yield from chart.problems(root)


if __name__ == "__main__":
    main()
