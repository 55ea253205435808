"""What a build says of how far it is, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from router.pool.progress import Bars


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _build(bars: Bars) -> None:
    with bars.visible():
        bars("reading", 500, 1000)
        bars("reading", 1000, 1000)
        bars("finding neighbours", 0, 0)
        bars("pruning edges", 10, 20)


def test_elsewhere_each_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _build(Bars())
    output = capsys.readouterr().err
    assert output.splitlines() == [
        "ppd-pool: reading",
        "ppd-pool: finding neighbours",
        "ppd-pool: pruning edges",
    ]


def test_on_a_terminal_each_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _build(Bars())
    output = terminal.getvalue()
    assert "reading: 100%" in output
    assert "1.00k/1.00k" in output
    assert "finding neighbours: 00:00" in output  # nobody can tell how long: a clock
    assert "pruning edges:  50%" in output
