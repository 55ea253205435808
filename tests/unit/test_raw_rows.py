"""Raw rows on a full disk: none is half written, none is lost, the error is clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.raw_rows import append_whole, appending, read_rows
from ppd.errors import ConfigError

from ..disks import disk_of


def test_rows_come_one_after_the_other_and_are_whole(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    row = {"text": "x" * 40}
    room = len(json.dumps(row)) + 1
    with appending(out) as write, disk_of(2 * room + 10):
        write(row)
        write(row)
        with pytest.raises(ConfigError, match=r"raw\.jsonl: cannot be written: .*File too large"):
            write(row)
    assert [one for _, one in read_rows(out)] == [row, row]
    assert out.read_bytes().endswith(b"}\n")


def test_all_rows_or_none(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    append_whole(out, [{"n": 0}])
    with disk_of(30), pytest.raises(ConfigError, match="what was written before is kept"):
        append_whole(out, [{"n": 1}, {"n": 2, "text": "x" * 40}])
    assert [one for _, one in read_rows(out)] == [{"n": 0}]


def test_an_output_that_cannot_be_written_fails_before_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), appending(tmp_path):
        pytest.fail("a folder is no file")


def test_what_a_kill_cut_short_is_not_glued_to_the_next_row(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    out.write_text('{"n": 0}\n{"n"')
    with appending(out) as write:
        write({"n": 1})
    assert [one for _, one in read_rows(out)] == [{"n": 0}, {"n": 1}]
