"""Tables for other programs: their JSON schema, and the reader in C."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from eval.cli import main
from ppd.score import Weights, score
from ppd.table import Table
from ppd.table_file import VERSION

from .fixtures import costs_of, table_record

TABLES = Path(__file__).parents[2] / "tables"
SHIPPED = TABLES / "cpu-tiny-llama-1P1D.json"


def test_the_schema_names_its_version_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["table", "schema"])
    assert ended.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["version"] == {"const": VERSION}
    definitions = {name: set(one["properties"]) for name, one in schema["$defs"].items()}
    table = json.loads(SHIPPED.read_text())
    assert set(schema["properties"]) == {*table, "machine"}
    assert definitions["CellRecord"] == set(table["cells"][0])
    assert definitions["Measured"] == set(table["cells"][0]["remote"])
    assert definitions["Axes"] == set(table["axes"])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of ``tables/read_table.c``."""
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/jansson.h").exists():
        pytest.skip("needs a C compiler and libjansson-dev")
    program = tmp_path_factory.mktemp("reader") / "read_table"
    source = TABLES / "read_table.c"
    flags = ["-Wall", "-Wextra", "-Werror", "-O2"]
    subprocess.run([compiler, *flags, "-o", program, source, "-ljansson", "-lm"], check=True)
    return program


def read(reader: Path, table: Path, *values: float) -> subprocess.CompletedProcess[str]:
    argv = [str(reader), str(table), *map(str, values)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_the_reader_decides_as_algorithm_1(reader: Path) -> None:
    table, source = Table.parse(SHIPPED.read_bytes()), random.Random(4)
    routes = set()
    for _ in range(60):
        turn = (source.randrange(60_000), source.randrange(3_000), source.randrange(500))
        qps = source.uniform(0, 11)
        weights = Weights(source.uniform(0, 5), source.uniform(0.1, 5), source.uniform(0, 5))
        cell = table.find(*turn, qps)
        assert cell is not None
        expected = score(weights, cell.remote, cell.local)
        done = read(reader, SHIPPED, *turn, qps, *structs.astuple(weights))
        assert done.returncode == 0, done.stderr
        route, shown, *_ = done.stdout.split()
        assert float(shown.removeprefix("score=")) == pytest.approx(expected.local, abs=1e-5)
        assert route == ("local" if expected.prefers_local else "remote")
        routes.add(route)
    assert routes == {"local", "remote"}


def test_the_reader_refuses_what_it_cannot_answer(reader: Path, tmp_path: Path) -> None:
    beyond = read(reader, SHIPPED, 10, 10, 10, 1e6)
    assert (beyond.returncode, beyond.stdout) == (1, "beyond qps\n")
    other = tmp_path / "table.json"
    other.write_text(json.dumps({**json.loads(SHIPPED.read_text()), "version": VERSION + 1}))
    plain = tmp_path / "plain.json"  # a table without throughput
    plain.write_bytes(msgspec.json.encode(table_record(costs_of)))
    cases: tuple[tuple[Path, str, tuple[float, ...]], ...] = (
        (other, "not of version 1", ()),
        (tmp_path / "none.json", "No such file", ()),
        (plain, "it has no throughput", (1, 1, 0.1)),
    )
    for file, problem, weights in cases:
        done = read(reader, file, 10, 10, 10, 1, *weights)
        assert done.returncode == 2
        assert problem in done.stderr
