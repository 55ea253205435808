"""Documents and their rows: a drifted number, broken markers, unknown names, missing rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.report.documents import Rewritten, rewritten
from eval.report.names import BLOCKS, NUMBERS, Catalogue
from eval.report.parts import Block, Table, block
from eval.report.results import Results, Rows
from ppd.errors import ConfigError

ROOT = Path(__file__).parents[2]
ORIGIN = {"commit": "c0ffee123456", "hardware": "1 cores of it", "at": "2026-11-21T20:00:00+00:00"}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def remade(text: str) -> Rewritten:
    return rewritten(text, "D.md", lambda name: f"table of {name}", lambda name: f"<{name}>")


FRESH = (
    "# D\n\n<!-- report:a -->\n\ntable of a\n\n<!-- /report -->\n\nit is <!--n:b--><b><!--/n-->.\n"
)


def test_what_is_fresh_stays_as_it_is() -> None:
    made = remade(FRESH)
    assert (made.text, made.names, made.drifts) == (FRESH, ("report:a", "n:b"), ())


def test_a_drifted_table_is_made_anew_and_shown_as_a_diff() -> None:
    made = remade(FRESH.replace("table of a", "an old table\nwith 3.14"))
    assert made.text == FRESH
    (drift,) = made.drifts
    assert (drift.document, drift.name) == ("D.md", "report:a")
    assert drift.diff().splitlines()[:2] == ["--- D.md report:a", "+++ report:a from its rows"]
    assert "-with 3.14" in drift.diff()
    assert "+table of a" in drift.diff()


def test_a_drifted_number_is_made_anew_and_shown_with_its_line() -> None:
    made = remade(FRESH.replace("<b>", "17"))
    assert made.text == FRESH
    (drift,) = made.drifts
    assert drift.name == "n:b"
    assert "-it is <!--n:b-->17<!--/n-->." in drift.diff()


def test_markers_in_fenced_code_are_code() -> None:
    text = "```\n<!-- report:a -->\n<!--n:b-->\n```\n"
    assert remade(text) == Rewritten(text, (), ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x\n<!-- report:a -->\ny\n", r"D\.md:2: report:a has no <!-- /report -->"),
        ("<!-- report:a -->\n<!-- report:b -->\n<!-- /report -->", r"D\.md:1: report:a has no"),
        ("x\n<!-- /report -->\n", r"D\.md:2: <!-- /report --> begins nothing, and ends nothing"),
        ("<!-- report: a -->\n<!-- /report -->", r"D\.md:1: .* begins nothing"),
        ("it is <!--n:b-->17.", r"D\.md:1: a number's marker has no begin or no end"),
        ("it is 17<!--/n-->.", r"D\.md:1: a number's marker has no begin or no end"),
        ("- <!--n:b-->17<!--/n-->", r"D\.md:1: a number's marker must not begin a line"),
    ],
)
def test_a_broken_marker_is_an_error_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        remade(text)


def test_an_unknown_name_is_an_error_with_document_and_line(tmp_path: Path) -> None:
    catalogue = Catalogue(Results(tmp_path), {}, {"known": lambda _: "1"})
    text = "x <!--n:nonesuch--><!--/n-->"
    with pytest.raises(ConfigError, match=r"D\.md:1: nonesuch: no such number; known: known"):
        rewritten(text, "D.md", catalogue.block, catalogue.number)


def test_a_table_has_a_cell_for_each_of_its_heads() -> None:
    with pytest.raises(AssertionError, match="2 cells for the heads"):
        Table(("one", "two", "two"), [("1", "2", "3"), ("1", "2")])


def a_block(results: Results) -> Block:
    rows = results.rows("some.jsonl").where(part="cell")
    table = Table(("ms",), [(f"{ms:g}",) for ms in rows.values("ms")], "what it took")
    return block(table, made_of=[rows])


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (tmp_path / "results").mkdir()
    return Results(tmp_path / "results")


def test_a_block_names_file_commit_date_and_hardware(results: Results) -> None:
    dirty = ORIGIN | {"commit": "c0ffee123456+", "at": "2026-11-22T20:00:00+00:00"}
    rows = [{"part": "cell", "ms": 3.5} | ORIGIN, {"part": "cell", "ms": 4.0} | dirty]
    write(results.folder / "some.jsonl", [*rows, {"part": "other"} | ORIGIN])
    text = Catalogue(results, {"a": a_block}, {}).block("a")
    assert text.startswith("What it took:\n\n| ms |\n| --- |\n| 3.5 |\n| 4 |\n\n")
    assert text.endswith(
        "<sub>Rows: results/some.jsonl; commits c0ffee1, c0ffee1+; 2026-11-21, 2026-11-22; "
        "1 core of it.</sub>"
    )


def test_rows_without_an_origin_have_that_of_their_file(results: Results) -> None:
    write(results.folder / "some.jsonl", [{"part": "cell", "ms": 1}, {"row": "run"} | ORIGIN])
    assert "commit c0ffee1; 2026-11-21" in Catalogue(results, {"a": a_block}, {}).block("a")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (None, r"a: results/some\.jsonl: there is no such file"),
        ([], r"a: results/some\.jsonl: there are no rows in it"),
        ([{"part": "other"}], r"a: results/some\.jsonl: no row has part cell"),
    ],
)
def test_missing_rows_are_an_error(
    results: Results, rows: list[dict[str, Any]] | None, problem: str
) -> None:
    if rows is not None:
        write(results.folder / "some.jsonl", rows)
    catalogue = Catalogue(results, {"a": a_block}, {})
    text = "<!-- report:a -->\n<!-- /report -->"
    with pytest.raises(ConfigError, match=rf"D\.md:1: {problem}"):
        rewritten(text, "D.md", catalogue.block, catalogue.number)


def test_a_row_without_a_field_is_an_error(results: Results) -> None:
    write(results.folder / "some.jsonl", [{"part": "cell"} | ORIGIN])
    catalogue = Catalogue(results, {}, {"n": lambda of: of.rows("some.jsonl").rows[0]["ms"]})
    with pytest.raises(ConfigError, match="its rows have no 'ms'"):
        catalogue.number("n")


def test_the_newest_rows_are_all_of_the_last_commit(results: Results) -> None:
    later = {"commit": "fedcba+", "at": "2026-11-22T20:00:00+00:00"}
    rows = [ORIGIN | {"n": 0}, later | {"n": 1}, ORIGIN | {"n": 2}, later | {"n": 3}]
    write(results.folder / "some.jsonl", rows)
    newest = results.rows("some.jsonl").newest()
    assert newest.values("n") == [1, 3]
    assert isinstance(newest, Rows)


DEMO = {
    "routes": ["remote"],
    "context_tokens": [0],
    "new_tokens": [10],
    "cached_tokens": [0],
    "ttft_ms": [25.04],
    "delta_ttft_ms": [31.0],
    "full_ttft_ms": [99.0],
    "identical_to_monolithic": True,
    "model": "m",
    "seed": 0,
}


def report(results: Results, *more: str) -> int:
    page = str(results.folder.parent / "report.html")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "--results", str(results.folder), "--html", page, *more])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_writes_documents_and_checks_them(results: Results, capsys: Any) -> None:
    write(results.folder / "demo.jsonl", [DEMO | ORIGIN])
    readme = results.folder.parent / "README.md"
    readme.write_text("# It\n\n<!-- report:demo -->\n<!-- /report -->\n")
    assert report(results) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == [str(readme)]
    assert "| 1 | 0 | 10 | 0 | 25 | 31 | 99 |" in readme.read_text()
    assert report(results, "--check") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"part": "report", "markers": 1, "drifted": []}

    readme.write_text(readme.read_text().replace("| 25 |", "| 24 |"))
    assert report(results, "--check") == 1
    said = capsys.readouterr()
    assert f"{readme}: report:demo is not what its rows give" in said.out
    assert "-| 1 | 0 | 10 | 0 | 24 | 31 | 99 |" in said.out
    assert "+| 1 | 0 | 10 | 0 | 25 | 31 | 99 |" in said.out
    assert json.loads(said.out.splitlines()[-1])["drifted"] == [f"{readme} report:demo"]
    assert "`make report` writes what the rows give" in said.err
    assert "| 24 |" in readme.read_text(), "a check writes nothing"


def test_a_drifted_page_fails_the_check(results: Results, capsys: Any) -> None:
    page = results.folder.parent / "docs/REPORT.md"
    assert report(results, "--markdown", str(page)) == 0
    assert report(results, "--check") == 0
    page.write_text(page.read_text() + "one more\n")
    capsys.readouterr()
    assert report(results, "--check") == 1
    assert "page is not what its rows give" in capsys.readouterr().out


def test_a_document_that_is_missing_is_an_error(results: Results) -> None:
    asked = ["report", "--results", str(results.folder), "--check", "--documents", "nonesuch.md"]
    with pytest.raises(SystemExit, match=r"nonesuch\.md: cannot be read: No such file"):
        cli.main(asked)


def test_every_name_stands_in_a_document() -> None:
    used = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if path.name != "LOG.md":
            used |= set(rewritten(path.read_text(), path.name, str, str).names)
    assert used == {f"report:{name}" for name in BLOCKS} | {f"n:{name}" for name in NUMBERS}
