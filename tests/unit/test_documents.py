"""The documents: what they name exists, and their checks find what is wrong."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from eval.cli import main as run_eval
from ppd import __version__
from ppd.contract import Role
from router.cli import main as run_router
from router.config.limits import AdmissionLimits, Tenant
from router.config.options import RouterConfig
from sglang_patches.worker import plan_launch
from tests.documents import troubleshooting
from tests.documents.__main__ import problems
from tests.documents.links import file_problems, link_problems
from tests.documents.markdown import anchors, code_blocks
from tests.documents.names import problems as name_problems
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


def executed() -> list[tuple[str, tuple[str, ...]]]:
    """The documents' commands that are to be executed, each with the output that is shown."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for path in documents(ROOT):
        for block in code_blocks(path.read_text()):
            if block.executed:
                text = "\n".join(block.lines).replace("\\\n", " ")
                command, *shown = text.split("\n")
                found.append((command.removeprefix("$ "), tuple(shown)))
    return found


@pytest.mark.parametrize(("command", "shown"), executed(), ids=lambda value: str(value)[:24])
def test_commands_print_what_the_documents_show(
    command: str,
    shown: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    run = {"ppd-eval": run_eval, "ppd-router": run_router}[program]
    with suppress(SystemExit):
        run(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert tuple(printed[: len(shown)]) == shown


def test_some_commands_of_the_documents_are_executed() -> None:
    assert {command.split()[0] for command, _ in executed()} == {"ppd-eval", "ppd-router"}


def test_every_option_in_the_routers_tables_exists() -> None:
    known = {"config", "check_config", *RouterConfig.__struct_fields__}
    known |= {*AdmissionLimits.__struct_fields__, *Tenant.__struct_fields__}
    tables, _, _ = (ROOT / "docs/ROUTER.md").read_text().partition("\n## ")
    rows = re.findall(r"^\| (`[^|]+) \|", tables, re.MULTILINE)
    named = {
        found[1].replace("-", "_").removeprefix("no_")
        for row in rows
        for span in re.findall(r"`([^`]+)`", row)
        if (found := re.match(r"(?:--|\[)?([a-z][a-z_-]*)", span))
    }
    assert len(named) > 50
    assert named <= known


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_quickstart_shows_the_command_that_a_worker_becomes() -> None:
    address = ["--model-path", "MODEL", "--host", "127.0.0.1", "--port", "30001"]
    launch = plan_launch(Role.DECODE, address, cpu=False, environment={}, engine="0.5.23")
    shown = " ".join((ROOT / "docs/GPU_QUICKSTART.md").read_text().split())
    assert f"ppd-worker: {launch}".replace(sys.executable, "python") in shown


def test_the_shapes_of_the_sizing_guide_have_the_printed_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/SIZING.md").read_text()
    (command,) = re.findall(
        r"^ppd-eval (simulate cluster .*?)\n```", text, re.DOTALL | re.MULTILINE
    )
    with suppress(SystemExit):
        run_eval(shlex.split(command.replace("\\\n", " ")))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4
    for row in rows:
        cells = (
            f"`{row['shape']}`",
            f"{row['local_share']:.2f}",
            f"{row['lost_share']:.2f}",
            f"{row['moved_tokens_per_turn']:.0f}",
            f"{row['t2_ttft_p50_ms']:.1f}",
            f"{row['tpot_p50_ms']:.2f}",
        )
        assert f"| {' | '.join(cells)} |" in text


# -- the checks themselves ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("`ppd-router --processes 2` and `ppd-eval table lint FILE --w-tpot 3`", []),
        ("`ppd-router --procs 2`", ["ppd-router --procs: there is no such flag"]),
        ("```\nppd-eval simulate \\\n  plans --qps 1\n```", ["plans: there is no such command"]),
        ("`ppd-eval plan`", ["ppd-eval plan: there is no such command"]),
        ("`ppd-eval plan` of\ncommit 94f6afb measured this.", []),
        ("```\nPPD_ENABLE=0 ppd-worker --role decode --tp-size 2\n```", []),
        ("`ppd-worker --ppd-chunk 3`", ["ppd-worker --ppd-chunk: there is no such flag"]),
        ("`ppd-router --port 1 | tail --lines 1`", []),
        ("`--no-such-flag` and `--ppd-*`", ["--no-such-flag: there is no such flag"]),
        ("```\nexport PPD_ENABLED=1\n```", ["PPD_ENABLED: there is no such variable"]),
        ("`PPD_*`, `PPD_ADMIN_TOKEN`, `PPD_UNROOMED=1`", []),
        ("```\nrate(ppd_turns_totl[5m])\n```", ["ppd_turns_totl: there is no such metric"]),
        ('`ppd_turns_total{route="local"}`, `ppd_ttft_seconds_bucket`, `import ppd_router`', []),
    ],
)
def test_names_that_do_not_exist_are_found(text: str, named: list[str]) -> None:
    found = [problem for _, problem in name_problems("docs/X.md", text + "\n")]
    assert len(found) == len(named)
    assert all(problem.endswith(name) for problem, name in zip(found, named, strict=True))


def test_flags_of_other_routers_are_not_ours() -> None:
    row = "| `--prefill-policy` | `--prefill`, `--polices` |\n"
    named = [problem for _, problem in name_problems("docs/MIGRATION.md", row)]
    assert named == ["--polices: there is no such flag"]
    assert len(list(name_problems("docs/X.md", row))) == 2


def test_reasons_that_are_missing_or_unknown_are_found() -> None:
    text = (ROOT / troubleshooting.NAME).read_text()
    assert list(troubleshooting.problems(ROOT, text)) == []
    wrong = text.replace("| `home_full` | KV", "| `home_ful` | KV")
    assert [problem for _, problem in troubleshooting.problems(ROOT, wrong)] == [
        "there is no reason home_ful",
        "reason home_full is not in the table",
    ]
    fewer = re.sub(r"\| `kv_events_stopped` \|.*\n", "", text)
    assert [problem for _, problem in troubleshooting.problems(ROOT, fewer)] == [
        "fallback kv_events_stopped is not in the table"
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("```log\nworker dropped: ROLE URL (no heartbeat for N s)\n```\n", 0),
        ("```log\nworker dropped: ROLE URL (no heart beat for N s)\n```\n", 1),
        ("```log\nworker dropped: ROLE URL (no heartbeat\n```\n", 1),
        ("```log\nno decision table for MODELS: later turns go by the ...\n```\n", 0),
        ("| status | the message |\n|---|---|\n| 503 | `there are N connections already` |\n", 0),
        ("| status | the message |\n|---|---|\n| 503 | `there are too many connections` |\n", 1),
    ],
)
def test_lines_that_the_code_does_not_write_are_found(text: str, count: int) -> None:
    listed = (ROOT / troubleshooting.NAME).read_text()
    assert len(list(troubleshooting.problems(ROOT, listed + "\n" + text))) == count


def test_blocks_have_their_lines_and_marks() -> None:
    text = "<!-- executed -->\n\n```console\n$ a\nb\n```\n\n~~~\n```\n~~~\n"
    assert [(b.line, b.language, b.lines, b.executed) for b in code_blocks(text)] == [
        (4, "console", ("$ a", "b"), True),
        (9, "", ("```",), False),
    ]


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
