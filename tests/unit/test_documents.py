"""The documents: what they name exists, and their checks find what is wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ppd import __version__
from router.config.limits import AdmissionLimits, Tenant
from router.config.options import RouterConfig
from tests.documents import metrics
from tests.documents.__main__ import problems
from tests.documents.links import file_problems, link_problems
from tests.documents.markdown import anchors, code_spans
from tests.documents.prose import problems as prose_problems
from tests.documents.prose import sentences
from tests.documents.settings import Settings, documents
from tests.documents.types import Option, default_words, options_of, type_words

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(max_columns=48, max_words=8, conforming=(), unchecked_paths=())
_INSTALL = re.compile(r"pip install[^\n`]*?['\"](?:sglang-ppd|\.)\[([\w,-]+)\]['\"]")


def texts() -> dict[str, str]:
    """All documents, and the sources whose messages name packages."""
    sources = [p for top in ("ppd", "router", "sglang_patches") for p in (ROOT / top).rglob("*.py")]
    found = [*documents(ROOT), *sources, ROOT / "Makefile"]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}


def test_the_documents_are_in_order() -> None:
    assert list(problems(ROOT)) == []


def test_every_extra_that_is_to_be_installed_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        (extra, name)
        for name, text in texts().items()
        for extras in _INSTALL.findall(text)
        for extra in extras.split(",")
    }
    assert {"engine", "kv-events", "k8s", "pool", "docs"} <= {extra for extra, _ in named}
    known = project["optional-dependencies"].keys()
    assert {(extra, name) for extra, name in named if extra not in known} == set()


def test_every_metric_that_a_document_names_is_exported() -> None:
    exported = metrics.names()
    bases = {re.sub(r"_total$", "", name) for name in exported}
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    allowed = {base + suffix for base in bases for suffix in suffixes}
    packages = {"ppd_router", "ppd_eval", "ppd_tables"}
    for path in documents(ROOT):
        if path.name == "LOG.md":  # of the past
            continue
        for line, span in code_spans(path.read_text()):
            for name in re.findall(r"(?<![\w/.])ppd_[a-z_]+(?![\w*.])", span):
                assert name in allowed | packages, f"{path.name}:{line}: {name}"


def test_every_option_in_the_routers_tables_exists() -> None:
    known = {"config", "check_config", *RouterConfig.__struct_fields__}
    known |= {*AdmissionLimits.__struct_fields__, *Tenant.__struct_fields__}
    tables, _, _ = (ROOT / "docs/ROUTER.md").read_text().partition("\n## ")
    rows = re.findall(r"^\| (`[^|]+) \|", tables, re.MULTILINE)
    named = {
        found[1].replace("-", "_")
        for row in rows
        for span in re.findall(r"`([^`]+)`", row)
        if (found := re.match(r"(?:--|\[)?([a-z][a-z_-]*)", span))
    }
    assert len(named) > 50
    assert named <= known


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


# -- the checks themselves ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A short sentence.\n", []),
        ("One two three four five six seven eight. Next.\n", []),
        ("One two three four five\nsix seven eight nine.\n", [1]),
        ("- One two three four five\n- six seven eight nine\n", []),
        ("```\none two three four five six seven eight nine ten eleven\n```\n", [2]),
        ("| one two three four five six seven eight nine ten eleven | a |\n", []),
        ("[link](https://example.org/a/very/long/address/indeed)\n", []),
        ("One `a b c d e f` three [four five](x.md) six seven.\n", [1]),
    ],
)
def test_long_lines_and_sentences_are_found(text: str, found: list[int]) -> None:
    assert [line for line, _ in prose_problems(text, SETTINGS)] == found


def test_sentences_end_where_readers_end_them() -> None:
    text = "SGLang 0.5.21 runs, e.g. on a CPU. It ends. (Or not.) lower-case follows! Does it?"
    assert list(sentences(text)) == [
        "SGLang 0.5.21 runs, e.g. on a CPU.",
        "It ends.",
        "(Or not.",
        "lower-case follows!",
        "Does it?",
    ]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    one, two = tmp_path / "ONE.md", tmp_path / "docs" / "TWO.md"
    known = {
        one: "# One\n[a](docs/TWO.md#a-b--c)\n[b](docs/TWO.md#nothing)\n[c](gone.md) `[d](e.md)`\n",
        two: "## A `B` & C\n[up](../ONE.md)\n[out](../../x.md)\n```\n# no heading\n```\n",
    }
    for path, text in known.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert [line for line, _ in link_problems(tmp_path, one, known)] == [3, 4]
    assert [line for line, _ in link_problems(tmp_path, two, known)] == [3]
    assert anchors(known[two]) == {"a-b--c"}
    assert anchors("# A\n# A\n") == {"a", "a-1"}


def test_files_that_do_not_exist_are_found() -> None:
    text = "`ppd/errors.py` and\n`ppd/gone.py`, but not `router/*.py` or `gone.py`.\n"
    assert [line for line, _ in file_problems(ROOT, text)] == [2]


def test_types_and_defaults_are_in_words() -> None:
    options = {option.name: option for option in options_of(RouterConfig)}
    assert type_words(options["port"].kind) == "integer, 0..65535"
    assert type_words(options["admin_port"].kind) == "integer, 0..65535"
    assert type_words(options["prefill"].kind) == "list of strings"
    assert default_words(options["admin_port"]) == "none"
    assert default_words(options["kv_events"]) == "`true`"
    assert default_words(Option("x", str, None, required=True)) == "required"
