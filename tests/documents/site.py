"""The pages of the site that are not files in ``docs/``; mkdocs loads this module as a hook.

It adds the start page and those of the project from the top of the checkout, the pages of the
Python API, and ``openapi.json``. mkdocs loads it by its path, so it imports nothing of its own
package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from router.admin.endpoints import OPERATIONS
from router.admin.openapi import document

_ROOT = Path(__file__).parents[2]
_TOP = {
    "README.md": "index.md",
    "CITATION.cff": "CITATION.cff",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
_PACKAGES = ("ppd", "router", "sglang_patches")
_API = "reference/python"
_NAV_TITLE = "Python API"
_UNDER_OWN_HEADING = """\
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""
_LICENSE = """\
# Licence

```text
{licence}
```

## Notice

```text
{notice}
```
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the Python API to the navigation."""
    assert config.nav is not None
    (reference,) = (entry["Reference"] for entry in config.nav if "Reference" in entry)
    (entry,) = (entry for entry in reference if _NAV_TITLE in entry)
    entry[_NAV_TITLE] = [{name: _page_of(name)} for name in _packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, target in _TOP.items():
        text = _from_docs((_ROOT / source).read_text())
        files.append(File.generated(config, target, content=text))
    texts = {name: (_ROOT / name).read_text() for name in ("LICENSE", "NOTICE")}
    licence = _LICENSE.format(licence=texts["LICENSE"], notice=texts["NOTICE"])
    files.append(File.generated(config, "LICENSE.md", content=licence))
    for name in _packages():
        files.append(File.generated(config, _page_of(name), content=_api_page(name)))
    described = json.dumps(document(OPERATIONS), indent=1)
    files.append(File.generated(config, "openapi.json", content=described))
    return files


def _from_docs(text: str) -> str:
    """A document of the top with links as they are in ``docs/``."""
    text = re.sub(r"\]\(docs/", "](", text)
    return text.replace("](LICENSE)", "](LICENSE.md)")


def _packages() -> Iterator[str]:
    """Yield the names of all packages, each before those in it."""
    for top in _PACKAGES:
        for path in sorted((_ROOT / top).rglob("__init__.py")):
            yield ".".join(path.parent.relative_to(_ROOT).parts)


def _page_of(package: str) -> str:
    return f"{_API}/{package}.md"


def _api_page(package: str) -> str:
    folder = _ROOT.joinpath(*package.split("."))
    modules = [path.stem for path in sorted(folder.glob("*.py")) if path.stem[0] != "_"]
    parts = [f"# {package}", _described(package)]
    for name in modules:
        parts += [f"## {name}", _described(f"{package}.{name}")]
    return "\n\n".join(parts)


def _described(module: str) -> str:
    return f"::: {module}\n{_UNDER_OWN_HEADING}"
